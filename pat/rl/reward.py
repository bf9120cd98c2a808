"""The reward: is the answer of a response the ground truth? What counts as an answer: ``pat.rl.answers``.

verl loads this file by its path, in a worker that calls ``compute_score`` from several threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from pat.rl import answers
from pat.rl.algebra import Algebra

_algebra = Algebra()
_truth = lru_cache(maxsize=4096)(answers.truth)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str | float, extra_info=None, ends: Sequence[str] = (), **_
) -> float:
    """1 if the answer is right; else a little, for GRPO learns only from differences within a group.

    gsm_symbolic: the right number anywhere in the response earns its share of the response's characters, which is
    reasoning-gym's own rule (``score_answer``, version 0.1.25). arithmetic: up to 0.5, the share of digits, since a
    random tiny model is never right but writes more or fewer digits. Any other data: 0.
    ends: end tokens that the decoded response shows. Raises ValueError for a ground truth that nothing could meet.
    """
    try:
        truth = _truth(ground_truth)
    except ValueError as error:
        raise ValueError(f"ground truth {ground_truth!r} of {data_source!r}: {error}") from None
    for end in ends:
        solution_str = solution_str.removesuffix(end)
    if right(truth, solution_str):
        return 1.0
    if data_source == "gsm_symbolic" and truth.text in solution_str:
        return len(truth.text) / len(solution_str)
    if data_source != "arithmetic" or not solution_str:
        return 0.0
    return 0.5 * sum(character.isdigit() for character in solution_str) / len(solution_str)


def right(truth: answers.Truth, response: str) -> bool:
    """Whether ``response`` answers with ``truth``; what it thinks before does not count."""
    response = response.rpartition("</think>")[2]
    if truth.number:
        inside = answers.boxed(response)
        found = answers.last_number(response) if inside is None else answers.number(inside)
        return found is not None and found.meets(truth.number)
    said = answers.final(response)
    if truth.words is not None:
        return answers.words(said) == truth.words
    meant, said = answers.latex(truth.text), answers.latex(said)
    if "=" not in meant:
        said = said.rpartition("=")[2].strip()
    if not said or len(said) > answers.LONGEST:
        return False
    return said == meant or _algebra.equal(meant, said)
