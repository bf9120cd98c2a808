"""Prompts in verl's schema: generated, or taken from the user's own Parquet file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import polars as pl

from pat.assets import schema
from pat.rl import answers
from pat.rl.algebra import Algebra

INSTRUCTION = "Solve the problem step by step. End with the answer, a single number."
ROW = "__row__"  # of the user's file


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


def _rows(source: str, size: int, seed: int, own_reward: bool) -> list[dict[str, Any]]:
    if source == "gsm_symbolic":
        return list(_gsm_symbolic(size, seed))
    if source == "arithmetic":
        return list(_arithmetic(size, seed))
    frame = schema.read(source, own_reward).with_row_index(ROW)
    rows = frame.sample(min(size, frame.height), seed=seed, shuffle=True).to_dicts()
    if not own_reward:
        _check_truths(rows)
    return rows


def _check_truths(rows: Sequence[dict[str, Any]]) -> None:
    """Make each ground truth a text. Raises ValueError naming the rows of those that no response could meet."""
    algebra, unread = Algebra(), []
    for row in rows:
        reward = row["reward_model"]
        reward["ground_truth"] = str(reward["ground_truth"])
        try:
            truth = answers.truth(reward["ground_truth"])
        except ValueError:
            unread.append(row)
            continue
        expression = truth.number is None and truth.words is None
        if expression and not algebra.readable(answers.latex(truth.text)):
            unread.append(row)
    if unread:
        first = min(unread, key=lambda row: row[ROW])
        rows = sorted(row[ROW] for row in unread)
        raise ValueError(
            f"a Parquet file whose ground truths are numbers, words or expressions in LaTeX; {schema.listed(rows)}: "
            f"{first['reward_model']['ground_truth']!r} is none of these (for a reward of your own set "
            "train.extra: {reward.custom_reward_function.path: FILE})"
        )


def _without_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The system's words at the head of the user's, for a chat template that refuses the role."""
    system, user, *rest = messages
    return [user | {"content": f"{system['content']}\n\n{user['content']}"}, *rest]


def _counted(source: str, row: dict[str, Any], length: Callable[[list], int]) -> int:
    """Tokens of the row's prompt. Raises ValueError if the chat template refuses it."""
    try:
        try:
            return length(row["prompt"])
        except Exception:
            if source not in schema.GENERATED or row["prompt"][0]["role"] != "system":
                raise
            row["prompt"] = _without_system(row["prompt"])
            return length(row["prompt"])
    except Exception as error:  # a chat template is a program of the checkpoint's
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        roles = ", ".join(message["role"] for message in row["prompt"])
        raise ValueError(
            f"prompts that the chat template of model.source takes; column prompt, row {row.get(ROW, 0)}, of the roles "
            f"{roles}: {reason}"
        ) from None


def split(
    source: str,
    train_size: int,
    val_size: int,
    seed: int,
    length: Callable[[list], int],
    max_prompt: int,
    own_reward: bool = False,
) -> dict[str, pl.DataFrame]:
    """``{"train": frame, "val": frame}`` of up to ``train_size`` and ``val_size`` prompts in verl's schema.

    Both come from one draw, so no prompt is in both. ``length`` counts a prompt's tokens; prompts longer than
    ``max_prompt`` tokens are dropped, and their number is printed. own_reward: see ``schema.check``.
    Raises ValueError, in words of what is allowed, if a row cannot be used or a part is left empty.
    """
    rows = _rows(source, train_size + val_size, seed, own_reward)
    fitting = [row for row in rows if _counted(source, row, length) <= max_prompt]
    print(
        f"{source}: {len(fitting)} prompts, {len(rows) - len(fitting)} dropped (over {max_prompt} tokens)",
        flush=True,
    )
    parts = {"val": fitting[:val_size], "train": fitting[val_size:]}
    for name, part in parts.items():
        if not part:
            raise ValueError(f"prompts of at most {max_prompt} tokens (rollout.max_prompt); no {name} prompt is left")
        for index, row in enumerate(part):
            row.pop(ROW, None)
            row["extra_info"] = (row.get("extra_info") or {}) | {"index": index, "split": name}
    return {name: pl.DataFrame(part) for name, part in parts.items()}
