import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat.predictor.calibration import POINTS, calibrate, gap
from pat.predictor.lengths import LengthModel

CAP = 200


def iterations(*lengths, cap=CAP):
    """Rows of requests.parquet: an iteration for each list of lengths."""
    rows = [
        (number, int(length), "length" if length >= cap else "stop")
        for number, each in enumerate(lengths, start=1)
        for length in each
    ]
    return pl.DataFrame(rows, schema=["iteration", "response_tokens", "finish_reason"], orient="row")


def geometric(rng, count, mean):
    return np.minimum(rng.geometric(1 / mean, count), CAP)


def test_a_distribution_that_stays_is_predicted():
    rng = np.random.default_rng(0)
    found = calibrate(iterations(*(geometric(rng, 3000, 60) for _ in range(4))), CAP)
    assert found["iteration"].unique().to_list() == [2, 3, 4]
    truth = (1 - 1 / 60) ** found["tokens"].to_numpy()
    np.testing.assert_allclose(found["observed"], truth, atol=0.04)
    np.testing.assert_allclose(found["predicted"], truth, atol=0.04)
    assert gap(found).mean <= gap(found).largest < 0.03


@pytest.mark.parametrize("alive_at", [30, 120])
def test_a_geometric_distribution_has_no_memory(alive_at):
    """What is left, given that a request is alive at any moment, is distributed as from the start."""
    rng = np.random.default_rng(1)
    found = calibrate(iterations(*(geometric(rng, 4000, 60) for _ in range(3))), CAP, alive_at)
    assert found["tokens"].min() == alive_at
    assert found.filter(tokens=alive_at).select("predicted", "observed").rows() == [(1.0, 1.0)] * 2
    truth = (1 - 1 / 60) ** (found["tokens"].to_numpy() - alive_at)
    np.testing.assert_allclose(found["observed"], truth, atol=0.08)
    np.testing.assert_allclose(found["predicted"], truth, atol=0.08)


def test_a_shift_of_the_lengths_is_seen():
    found = calibrate(iterations([50] * 100, [50] * 100, [150] * 100), CAP)
    steady, shifted = (found.filter(iteration=number) for number in (2, 3))
    assert gap(steady).largest < 0.05
    assert gap(shifted).largest > 0.9  # at 100 tokens, hardly one was predicted to be alive and all are
    late = shifted.filter(pl.col("tokens").is_between(60, 140))
    assert (late["observed"] == 1).all()
    assert (late["predicted"] < 0.1).all()


def test_no_iteration_predicts_itself():
    first, second = [20] * 50, [180] * 50
    alone = calibrate(iterations(first, second), CAP)
    followed = calibrate(iterations(first, second, [100] * 50), CAP)
    assert alone.equals(followed.filter(iteration=2))
    model = LengthModel()
    model.observe(first, [True] * 50)
    np.testing.assert_allclose(alone["predicted"], model.survival(CAP)[alone["tokens"].to_numpy()])


def test_responses_that_the_cap_cut_count_as_alive():
    found = calibrate(iterations(*[[CAP] * 80 + [10] * 20] * 3), CAP)
    last = found.filter(tokens=CAP - 1)
    assert last["observed"].to_list() == pytest.approx([0.8, 0.8])
    assert last["predicted"].to_list() == pytest.approx([0.8, 0.8], abs=0.04)


@given(st.lists(st.lists(st.integers(1, CAP), min_size=1, max_size=20), max_size=4), st.integers(0, CAP - 1))
def test_shares_fall_from_one(lengths, alive_at):
    found = calibrate(iterations(*lengths), CAP, alive_at)
    alive = [number for number, each in enumerate(lengths, start=1) if number > 1 and max(each) > alive_at]
    assert found["iteration"].unique().sort().to_list() == alive
    for _, part in found.group_by("iteration"):
        assert len(part) <= POINTS
        for shares in (part["predicted"].to_numpy(), part["observed"].to_numpy()):
            assert shares[0] == 1.0
            assert (np.diff(shares) <= 1e-12).all()
            assert shares.min() >= 0
    assert (gap(found) is None) == (not alive)


def test_iterations_count_by_their_responses():
    found = pl.DataFrame(
        {"iteration": [2, 3], "tokens": [5, 5], "predicted": [0.5, 0.5], "observed": [0.1, 0.6], "responses": [1, 9]}
    )
    assert gap(found) == pytest.approx((0.05, 0.05))


def test_an_impossible_moment_is_refused():
    with pytest.raises(ValueError, match="alive_at is 200: allowed is 0 to cap - 1 = 199"):
        calibrate(iterations([1], [2]), CAP, CAP)
