"""The reward: the last number counts, however it is written."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat.rl.reward import compute_score, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 288.", "288"),
        ("so 3 + 4 = 7", "7"),
        ("It costs $1,234.50!", "1234.5"),
        ("**19**", "19"),
        ("\\boxed{-5}", "-5"),
        ("0.50", "0.5"),
        ("about .25", "0.25"),
        ("12, 13,", "13"),
        ("3 dollars\n\n", "3"),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "no number", "-", ".", ",,,", "$"])
def test_no_number(text):
    assert last_number(text) is None


@given(
    value=st.integers(-(10**9), 10**9),
    before=st.text("abc =+\n", max_size=20),
    after=st.sampled_from(["", ".", " .", "\n", "!"]),
)
def test_the_right_number_earns_one_in_any_form(value, before, after):
    for form in (f"{value}", f"{value:,}", f"{value}.0"):
        assert compute_score("gsm_symbolic", f"{before} {form}{after}", str(value)) == 1.0


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


def test_ground_truth_must_be_a_number():
    with pytest.raises(ValueError, match="not a number"):
        compute_score("mine", "1", "one")
