"""A generation stage accounts for each of its requests, or fails saying which iteration lost what."""

import pytest

from pat.engine.board import request_key
from pat.rl.identity import Identities
from pat.rl.iteration import Iteration, IterationError, lengths

CAP = 20


def iteration(answers, expected=None):
    """Iteration 7 of requests that ended with (response tokens, reason); None: no answer."""
    made = Iteration(7, Identities(0, 7, None, samples=2), expected)
    for number, answer in enumerate(answers):
        request = made.arrive(f"r{number}", [1, 2, number // 2])
        if answer:
            made.finish(request, *answer)
    return made


def test_all_there_with_a_reason_is_fine():
    iteration([(5, "stop"), (CAP, "length")], expected=2).check()
    iteration([(5, "stop")]).check()  # any number will do if none was asked for


@pytest.mark.parametrize(
    ("answers", "expected", "told"),
    [
        ([(5, "stop"), None, None], None, "2 of 3 requests have no answer"),
        ([(5, "stop"), (3, "abort")], None, "1 requests ended with abort, not stop or length"),
        ([(5, None), (3, "abort"), (1, "stop")], None, "2 requests ended with None, abort"),
        ([(5, "stop")], 2, "1 samples came back, 2 were asked for"),
        ([(5, "stop")] * 3, 2, "3 samples came back, 2 were asked for"),
        ([], 2, "0 samples came back, 2 were asked for"),
    ],
)
def test_what_is_missing_is_told_with_the_iteration(answers, expected, told):
    with pytest.raises(IterationError, match=f"iteration 7: {told}"):
        iteration(answers, expected).check()


def test_the_first_failure_is_told_even_if_others_are_unanswered():
    made = iteration([(5, "stop"), None, None])
    made.requests[1].error = "ValueError: prompt too long"
    with pytest.raises(IterationError, match="iteration 7: 1 of 3 requests failed, first: ValueError: prompt too long"):
        made.check()


def test_a_request_is_recorded_with_who_it_is_and_when_it_ran():
    made = iteration([(5, "stop"), (CAP, "length")])
    first, second = made.record()
    seed, _ = Identities(0, 7, None, samples=2).next([1, 2, 0])
    assert (first["key"], first["prompt_tokens"], first["seed"]) == (request_key("r0"), 3, seed)
    assert (second["response_tokens"], second["finish_reason"]) == (CAP, "length")
    assert first["arrive"] <= first["finish"]
    assert second["seed"] != seed


def test_a_response_ended_by_itself_unless_the_cap_cut_it():
    made = iteration([(5, "stop"), (CAP, "length"), (CAP, "stop"), (8, "length")])
    # the last was cut short of the cap by a replayed length: by design, so that it counts as ended
    assert lengths(made.record(), CAP) == ([5, CAP, CAP, 8], [True, False, True, True])
