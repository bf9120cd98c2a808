"""Prompts in verl's schema: generated, or taken from the user's own Parquet file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import polars as pl

from pat.assets import schema

INSTRUCTION = "Solve the problem step by step. End with the answer, a single number."


def _row(source: str, prompt: list[dict[str, str]], answer: str) -> dict[str, Any]:
    truth = {"style": "rule", "ground_truth": answer}
    return {"data_source": source, "prompt": prompt, "ability": "math", "reward_model": truth}


def _gsm_symbolic(size: int, seed: int) -> Iterable[dict[str, Any]]:
    import reasoning_gym

    for item in reasoning_gym.create_dataset("gsm_symbolic", size=size, seed=seed):
        messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": item["question"]}]
        yield _row("gsm_symbolic", messages, str(item["answer"]))


def _arithmetic(size: int, seed: int) -> Iterable[dict[str, Any]]:
    rng = random.Random(seed)
    for _ in range(size):
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        yield _row("arithmetic", [{"role": "user", "content": f"{a}+{b}="}], str(a + b))


def _rows(source: str, size: int, seed: int) -> list[dict[str, Any]]:
    if source == "gsm_symbolic":
        return list(_gsm_symbolic(size, seed))
    if source == "arithmetic":
        return list(_arithmetic(size, seed))
    frame = schema.read(source)
    return frame.sample(min(size, frame.height), seed=seed, shuffle=True).to_dicts()


def split(
    source: str, train_size: int, val_size: int, seed: int, length: Callable[[list], int], max_prompt: int
) -> dict[str, pl.DataFrame]:
    """``{"train": frame, "val": frame}`` of up to ``train_size`` and ``val_size`` prompts in verl's schema.

    Both come from one draw, so no prompt is in both. ``length`` counts a prompt's tokens; prompts longer than
    ``max_prompt`` tokens are dropped, and their number is printed. Raises ValueError if a part is left empty.
    """
    rows = _rows(source, train_size + val_size, seed)
    fitting = [row for row in rows if length(row["prompt"]) <= max_prompt]
    print(
        f"{source}: {len(fitting)} prompts, {len(rows) - len(fitting)} dropped (over {max_prompt} tokens)",
        flush=True,
    )
    parts = {"val": fitting[:val_size], "train": fitting[val_size:]}
    for name, part in parts.items():
        if not part:
            raise ValueError(f"data.source {source} leaves no {name} prompt of at most {max_prompt} tokens")
        for index, row in enumerate(part):
            row["extra_info"] = (row.get("extra_info") or {}) | {"index": index, "split": name}
    return {name: pl.DataFrame(part) for name, part in parts.items()}
