"""The schema of prompts (verl's), and a user's own file in it.

What is wrong with a file is told as what would be right: errors read "a Parquet file whose column ... is ...; row 3 has
...". Rows are counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import polars as pl

# Columns that verl.utils.dataset.rl_dataset.RLHFDataset and its reward loop read (verl 0.9.1).
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
GENERATED = ("gsm_symbolic", "arithmetic")
MEDIA = ("images", "videos", "audios")
SHOWN = 10  # rows that an error lists

MESSAGES = 'column prompt is a list of {role, content}, both text: [{"role": "user", "content": "What is 7 + 5?"}]'
TRUTHS = "column reward_model is {style, ground_truth}, the truth a text or a number"


def check(path: str | Path, own_reward: bool = False) -> None:
    """Raise ValueError unless ``path`` is a Parquet file that verl can train on.

    own_reward: the reward is the user's own, to which any ground truth may mean something.
    """
    try:
        lazy = pl.scan_parquet(path)
        schema = lazy.collect_schema()
        missing = [name for name in COLUMNS if name not in schema]
        if missing:
            raise ValueError(f"a Parquet file with verl's columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}")
        frame = lazy.select(name for name in (*COLUMNS, *MEDIA) if name in schema).collect()
    except FileNotFoundError:
        raise ValueError(f"one of {', '.join(GENERATED)}, or a Parquet file") from None
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ValueError(f"a readable Parquet file ({error})") from None
    if frame.is_empty():
        raise ValueError("a Parquet file with at least one row")
    # The first only: rows are looked at where the types are right.
    for problem in chain(_types(frame.schema, own_reward), _rows(frame, own_reward)):
        raise ValueError(f"a Parquet file whose {problem}")


def read(path: str | Path, own_reward: bool = False) -> pl.DataFrame:
    """The user's Parquet file. Raises ValueError as ``check`` does."""
    check(path, own_reward)
    return pl.read_parquet(path)


def _types(schema: pl.Schema, own_reward: bool) -> Iterator[str]:
    """What is wrong with a whole column."""
    if schema["data_source"] != pl.String:
        yield f"column data_source is text, where the row is from; it is {_kind(schema['data_source'])}"
    message = _fields(schema["prompt"].inner) if isinstance(schema["prompt"], pl.List) else None
    if message is None:
        yield f"{MESSAGES}; it is {_kind(schema['prompt'])}"
    else:
        for field in ("role", "content"):
            if field not in message:
                yield f"{MESSAGES}; its messages have no {field}"
            elif message[field] != pl.String:
                parts = ": join the text of the parts" if isinstance(message[field], pl.List) else ""
                yield f"{MESSAGES}; the {field} of its messages is {_kind(message[field])}{parts}"
    truth = _fields(schema["reward_model"])
    if truth is None or "ground_truth" not in truth:
        lacks = "it has no ground_truth" if truth is not None else f"it is {_kind(schema['reward_model'])}"
        yield f"{TRUTHS}; {lacks}"
    elif not own_reward and not (truth["ground_truth"] == pl.String or truth["ground_truth"].is_numeric()):
        yield f"{TRUTHS}; ground_truth is {_kind(truth['ground_truth'])}"
    if not isinstance(schema["extra_info"], pl.Struct | pl.Null):
        yield f"column extra_info is a struct of what else a reward wants, or null; it is {_kind(schema['extra_info'])}"


def _rows(frame: pl.DataFrame, own_reward: bool) -> Iterator[str]:
    """What is wrong with some rows of columns whose types are right."""
    # Of a null element or list each field is null too.
    role, content = (pl.element().struct.field(name) for name in ("role", "content"))
    blank = content.str.strip_chars().str.len_chars().fill_null(0)
    prompt, truth = pl.col("prompt"), pl.col("reward_model").struct.field("ground_truth")
    kind = frame.schema["reward_model"].to_schema()["ground_truth"]
    wrong = [
        ("column data_source is text", "null", pl.col("data_source").is_null()),
        (MESSAGES, "null", prompt.is_null()),
        (MESSAGES, "no message", prompt.list.len() == 0),
        (MESSAGES, "a null role", prompt.list.eval(role.is_null()).list.any()),
        (MESSAGES, "a null content", prompt.list.eval(content.is_null()).list.any()),
        (MESSAGES, "no text in any message", prompt.list.eval(blank).list.sum() == 0),
        (TRUTHS, "null", pl.col("reward_model").is_null()),
    ]
    if not own_reward:
        wrong.append((TRUTHS, "a null ground_truth", truth.is_null()))
        if kind == pl.String:
            wrong.append((TRUTHS, "an empty ground_truth", truth.str.strip_chars() == ""))
        elif kind.is_float():
            wrong.append((TRUTHS, "a ground_truth that is not finite", ~truth.is_finite()))
    for name in MEDIA:
        if name in frame.columns and frame.schema[name] != pl.Null:
            column = pl.col(name)
            filled = column.list.len() > 0 if isinstance(frame.schema[name], pl.List) else column.is_not_null()
            wrong.append((f"column {name} is empty: the pat rollout generates text only", "some", filled))
    for allowed, got, found in wrong:
        rows = frame.select(found.fill_null(False).arg_true()).to_series().to_list()
        if rows:
            yield f"{allowed}; {listed(rows)} {'has' if len(rows) == 1 else 'have'} {got}"


def listed(rows: list[int]) -> str:
    """``row 3``, ``rows 3, 5`` or the first of many, counted from 0."""
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:SHOWN]))}{more}"


def _fields(kind: pl.DataType) -> pl.Schema | None:
    return kind.to_schema() if isinstance(kind, pl.Struct) else None


def _kind(kind: pl.DataType) -> str:
    """A type in the words of a user of Parquet files."""
    if kind == pl.String:
        return "text"
    if isinstance(kind, pl.List):
        return f"a list, of which each is {_kind(kind.inner)}"
    if isinstance(kind, pl.Struct):
        return f"a struct of {', '.join(field.name for field in kind.fields)}"
    return str(kind).lower()
