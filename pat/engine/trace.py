"""Read an engine's steps: what a switch cost in prefill, which decode steps are worth learning from (pure)."""

from __future__ import annotations

import numpy as np
import polars as pl


def readmission_s(steps: pl.DataFrame, end: float) -> float:
    """Seconds of prefill that put a switch's requests back to work.

    One-token extends if their KV moved, else whole contexts.
    steps: as ``Engine.steps``; end: when the switch ended on the last rank, time.monotonic(). On each rank the prefill
    steps that follow it before the first decode step; the slowest rank counts. Another replica may have begun one a
    little before that end: what is left of it counts.
    """
    left = (pl.col("start") + pl.col("seconds") - end).clip(upper_bound=pl.col("seconds"))
    after = steps.with_columns(left=left).filter(pl.col("left") > 0).sort("start")
    per_rank = (
        after.with_columns(decoding=pl.col("decode").cum_sum().over("rank") > 0)
        .filter(~pl.col("decoding"))
        .group_by("rank")
        .agg(pl.col("left").sum())
    )
    return per_rank["left"].max() or 0.0


def steady(rows: np.ndarray) -> np.ndarray:
    """The decode steps of one rank's ``rows`` (``board.STEP``, in order) that ``decode_steps`` would keep."""
    same = rows["decode"][1:] == 1
    for name in ("decode", "tp", "batch"):
        same &= rows[name][1:] == rows[name][:-1]
    return rows[1:][same]


def decode_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """Decode steps whose predecessor on that rank was one of the same shape: tp, batch, context, seconds, start, rank.

    The first step after a prefill, an end or a switch also rebuilds the batch; the predictor is about the others.
    """
    same = pl.all_horizontal(pl.col(name) == pl.col(name).shift(1).over("rank") for name in ("decode", "tp", "batch"))
    return (
        steps.sort("rank", "start")
        .filter(same & (pl.col("decode") == 1))
        .select("tp", "batch", "context", "seconds", "start", "rank")
    )
