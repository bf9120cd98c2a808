"""The reward as verl calls it: 1 for the right answer, a little on the way for the data sets of our own."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat.rl.reward import compute_score


@given(
    value=st.integers(-(10**9), 10**9),
    before=st.text("abc =\n", max_size=20),
    after=st.sampled_from(["", ".", " .", "\n", "!", ", as asked", " apples"]),
)
def test_the_right_number_earns_one_in_any_form(value, before, after):
    for form in (f"{value}", f"{value:,}", f"{value}.0", f"\\boxed{{{value}}}", str(value).replace("-", "\u2212")):
        assert compute_score("gsm_symbolic", f"{before} {form}{after}", str(value)) == 1.0


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_question_that_is_repeated_is_no_answer(a, b):
    for question in (f"{a}+{b}", f"{a} + {b}", f"{a}+{b}=", f"\\boxed{{{a}+{b}}}"):
        assert compute_score("mine", question, str(a + b)) == 0.0


def test_a_wrong_or_missing_number_earns_nothing():
    assert compute_score("gsm_symbolic", "the answer is 28", "288") == 0.0
    assert compute_score("mine", "first 288, no: 3", "288") == 0.0
    assert compute_score("gsm_symbolic", "", "288") == 0.0


def test_the_right_number_on_the_way_earns_its_share_of_the_text():
    assert compute_score("gsm_symbolic", "first 288, no: 3", "288") == 3 / 16


@given(text=st.text(max_size=40))
def test_arithmetic_gives_credit_for_digits_but_less_than_for_the_answer(text):
    score = compute_score("arithmetic", text, "99999999999999999999999999999999999999999")
    assert 0.0 <= score <= 0.5
    assert (score > 0) == any(character.isdigit() for character in text)


@pytest.mark.parametrize("truth", [7, 7.0, "7"])
def test_a_truth_may_be_a_number_or_text(truth):
    assert compute_score("mine", "7", truth) == 1.0
    assert compute_score("mine", "8", truth) == 0.0


@pytest.mark.parametrize("truth", ["", " ", r"\boxed{}", "it is 5 + 3 because of the apples", "assert f(1) == 2"])
def test_a_truth_that_nothing_could_meet_is_told_with_its_source(truth):
    with pytest.raises(ValueError, match=r"ground truth .* of 'mine': it is "):
        compute_score("mine", "1", truth)


def test_an_end_token_that_the_text_shows_is_no_part_of_the_answer():
    assert compute_score("mine", "yes<end>", "yes") == 0.0
    assert compute_score("mine", "yes<end>", "yes", ends=["<stop>", "<end>"]) == 1.0


def test_scores_of_many_threads_are_their_own():
    scores = {}

    def score(n):
        scores[n] = compute_score("mine", f"x^2 + {n}x", f"x({n}+x)" if n % 2 else f"x({n}-x)")

    threads = [threading.Thread(target=score, args=(n,)) for n in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert scores == {n: float(n % 2) for n in range(1, 17)}
