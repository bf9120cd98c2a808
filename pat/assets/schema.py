"""The schema of prompts (verl's), and a user's own file in it."""

from __future__ import annotations

from pathlib import Path

import polars as pl

# Columns that verl.utils.dataset.rl_dataset.RLHFDataset and its reward loop read (verl 0.9.1).
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
GENERATED = ("gsm_symbolic", "arithmetic")


def read(path: str | Path, rows: int | None = None) -> pl.DataFrame:
    """The user's Parquet file, or its first ``rows`` rows.

    Raises ValueError if the file is missing, cannot be read, is empty or lacks one of verl's columns.
    """
    try:
        frame = pl.read_parquet(path, n_rows=rows)
    except FileNotFoundError:
        raise ValueError(f"one of {', '.join(GENERATED)}, or a Parquet file") from None
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ValueError(f"a readable Parquet file ({error})") from None
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise ValueError(f"a Parquet file with verl's columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}")
    if frame.is_empty():
        raise ValueError("a Parquet file with at least one row")
    return frame
