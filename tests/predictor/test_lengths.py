import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import CensoredData, ecdf

from pat.predictor.lengths import LengthModel

CAP = 100
OBSERVED = st.lists(st.tuples(st.integers(1, CAP), st.booleans()), min_size=1, max_size=30)


@given(OBSERVED)
@settings(max_examples=60, deadline=None)
def test_without_a_prior_it_is_kaplan_meier(responses):
    lengths, finished = zip(*responses, strict=True)
    model = LengthModel(prior_weight=0)
    model.observe(lengths, finished)
    reference = ecdf(
        CensoredData(
            uncensored=np.array([n for n, f in responses if f], float),
            right=np.array([n for n, f in responses if not f], float),
        )
    )
    expected = [reference.sf.evaluate(t) for t in range(CAP + 1)]
    np.testing.assert_allclose(model.survival(CAP), expected, atol=1e-9)


def test_a_case_by_hand():
    model = LengthModel(prior_weight=0)
    model.observe([2, 3, 3, 5], [True, True, False, False])
    np.testing.assert_allclose(model.survival(6), [1, 1, 3 / 4, 3 / 4 * 2 / 3, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("cap", [256, 32768])
def test_the_prior_scales_with_the_cap(cap):
    survival = LengthModel().survival(cap)
    assert survival[cap // 4] == pytest.approx(0.5, abs=0.01)
    assert survival[cap] == pytest.approx(0.083, abs=0.003)


def test_history_overrules_the_prior():
    model = LengthModel()
    model.observe([10] * 200, [True] * 200)
    assert model.survival(CAP)[9] > 0.95
    assert model.survival(CAP)[10] < 0.05


def test_responses_cut_by_the_cap_are_not_ends():
    model = LengthModel()
    model.observe([CAP] * 90 + [5] * 10, [False] * 90 + [True] * 10)
    assert model.survival(2 * CAP)[CAP] > 0.8


def test_recent_iterations_weigh_more():
    model = LengthModel(prior_weight=0, decay=0.5)
    model.observe([10] * 8, [True] * 8)
    model.observe([50] * 8, [True] * 8)
    assert model.survival(CAP)[20] == pytest.approx(2 / 3)


@given(OBSERVED, st.lists(st.integers(0, 2 * CAP), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_remaining_ends_within_the_cap_and_falls_with_the_draw(responses, generated):
    model = LengthModel()
    model.observe(*zip(*responses, strict=True))
    draws = np.tile(np.linspace(1e-9, 1 - 1e-9, 15)[:, None], (1, len(generated)))
    remaining = model.remaining(np.array(generated), CAP, draws)
    assert remaining.shape == draws.shape
    assert np.issubdtype(remaining.dtype, np.integer)
    assert np.all(remaining >= 1)
    assert np.all(remaining <= np.maximum(CAP - np.array(generated), 1))
    assert np.all(np.diff(remaining, axis=0) <= 0)


@pytest.mark.parametrize("generated", [0, 30, 80])
def test_remaining_follows_the_conditional_survival(generated):
    model = LengthModel()
    model.observe([10, 20, 40, 60, 70], [True] * 5)
    draws = ((np.arange(20_000) + 0.5) / 20_000)[:, None]
    remaining = model.remaining(np.array([generated]), CAP, draws)[:, 0]
    survival = model.survival(CAP)
    for t in range(1, CAP - generated):
        expected = survival[generated + t] / survival[generated]
        assert np.mean(remaining > t) == pytest.approx(expected, abs=1e-3)


def test_beyond_everything_observed_the_tail_is_spread():
    model = LengthModel()
    model.observe([10] * 50, [True] * 50)
    remaining = model.remaining(np.array([60]), CAP, np.linspace(0.05, 0.95, 10)[:, None])
    assert len(np.unique(remaining)) > 3


def test_lengths_and_flags_must_match():
    with pytest.raises(ValueError, match="2 lengths but 1 finished"):
        LengthModel().observe([1, 2], [True])
