"""The reward of the built-in data sets: is the last number of the answer the right one?

verl imports this file by its path, so it depends on nothing else here.
"""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def last_number(text: str) -> Decimal | None:
    """The last number in ``text``, or None. Currency signs, thousands' commas and a final dot are ignored."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None, **_) -> float:
    """1 if the last number is the right one; else a little, for GRPO learns only from differences within a group.

    gsm_symbolic: the right number anywhere in the response earns its share of the response's characters, which is
    reasoning-gym's own rule (``score_answer``, version 0.1.25). arithmetic: up to 0.5, the share of digits, since a
    random tiny model is never right but writes more or fewer digits. Any other data: 0.
    """
    answer, truth = last_number(solution_str), last_number(ground_truth)
    if truth is None:
        raise ValueError(f"ground truth {ground_truth!r} of {data_source!r} is not a number")
    if answer == truth:
        return 1.0
    if data_source == "gsm_symbolic" and ground_truth in solution_str:
        return len(ground_truth) / len(solution_str)
    if data_source != "arithmetic" or not solution_str:
        return 0.0
    return 0.5 * sum(character.isdigit() for character in solution_str) / len(solution_str)
