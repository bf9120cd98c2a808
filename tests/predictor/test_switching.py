import itertools

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat.predictor.switching import SwitchModel

SCHEMA = ["tp_from", "tp_to", "mode", "requests", "kv_tokens", "total_s"]
RATES = {"migrate": 2e-5, "recompute": 8e-4}


def frame(rows):
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def seconds(mode, requests, tokens):
    return 0.2 + 0.01 * requests + RATES[mode] * tokens


@pytest.mark.parametrize("mode", RATES)
def test_the_parts_of_the_cost_are_recovered(mode):
    sizes = itertools.product((2, 4, 8), (60, 200))
    rows = [(1, 2, m, r, r * t, seconds(m, r, r * t)) for r, t in sizes for m in RATES]
    model = SwitchModel.fit(frame(rows))
    requests, tokens = np.array([1, 3, 16]), np.array([500, 0, 5000])
    expected = seconds(mode, requests, tokens)
    np.testing.assert_allclose(model.seconds(1, 2, requests, tokens, mode), expected, rtol=0.01)


def test_a_dense_profile_tells_when_ranks_are_idle():
    def cost(mode, requests, context):  # the busiest of 8 senders, of 2 that compute
        ranks = {"migrate": 8, "recompute": 2}[mode]
        return 0.02 + RATES[mode] * -(-requests // ranks) * context

    sizes = list(itertools.product((1, 4, 8, 16, 32, 64), (500, 2000, 8000)))
    model = SwitchModel.fit(frame([(1, 4, m, r, r * c, cost(m, r, c)) for r, c in sizes for m in RATES]))
    assert {mode: model.costs[1, 4, mode].spread for mode in RATES} == {"migrate": 8, "recompute": 2}
    for mode in RATES:
        for requests, context in ((1, 4000), (2, 1000), (16, 4000)):
            expected = cost(mode, requests, context)
            assert model.seconds(1, 4, requests, requests * context, mode) == pytest.approx(expected, rel=0.05)


ROWS = st.lists(
    st.tuples(
        st.just(1),
        st.just(2),
        st.sampled_from(sorted(RATES)),
        st.integers(0, 64),
        st.integers(0, 50_000),
        st.floats(1e-3, 60),
    ),
    min_size=1,
    max_size=5,
)


@given(ROWS)
def test_a_few_rows_give_costs_that_never_fall(rows):
    model = SwitchModel.fit(frame(rows))
    for mode in model.modes(1, 2):
        cost = model.costs[1, 2, mode]
        assert min(cost) >= 0
        assert sum(cost) > 0


def test_one_row_is_a_fixed_cost():
    model = SwitchModel.fit(frame([(2, 1, "migrate", 4, 800, 0.6)]))
    assert model.seconds(2, 1, 64, 100_000, "migrate") == pytest.approx(0.6, rel=1e-2)


def test_one_slow_repeat_of_three_does_not_pull_the_cost():
    model = SwitchModel.fit(frame([(1, 2, "migrate", 4, 800, s) for s in (0.5, 0.5, 9.0)]))
    assert model.seconds(1, 2, 4, 800, "migrate") == pytest.approx(0.5, rel=1e-3)


def test_a_missing_pair_is_named():
    model = SwitchModel.fit(frame([(1, 2, "migrate", 4, 800, 0.6)]))
    assert model.modes(1, 2) == ("migrate",)
    assert model.modes(2, 1) == ()
    with pytest.raises(ValueError, match="no switch cost for 2->1 migrate: the profile has 1->2 migrate"):
        model.seconds(2, 1, 4, 800, "migrate")
    with pytest.raises(ValueError, match="1->2 recompute"):
        model.seconds(1, 2, 4, 800, "recompute")
