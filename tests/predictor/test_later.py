import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.predictor.latency import DecodeModel
from pat.predictor.later import Later, Rest, moments
from pat.predictor.regression import Curve
from pat.predictor.remaining import drain

# A narrow step costs 10 + 1 a request, a wide one 6 + 3 (milliseconds): wide is better for few requests.
DECODE = DecodeModel(
    {1: Curve((0, 100), (0.010, 0.110)), 2: Curve((0, 100), (0.006, 0.306))},
    {1: Curve((0, 1000), (0, 0.001)), 2: Curve((0, 1000), (0, 0.0005))},
)


def test_moments_descend_to_one():
    assert moments(1).tolist() == []
    assert moments(2).tolist() == [1]
    for live in (3, 16, 1000):
        assert moments(live)[-1] == 1
        assert moments(live)[0] == live - 1
        assert np.all(np.diff(moments(live)) < 0)


@given(st.lists(st.integers(1, 80), min_size=2, max_size=12, unique=True))
@settings(max_examples=40, deadline=None)
def test_one_replica_is_as_if_it_were_run(lengths):
    tokens, context = np.array([lengths], float), np.full(len(lengths), 20.0)
    rest = Rest.of(DECODE, (1,), 1, tokens, context)
    whole = drain(DECODE, 1, tokens[:, None], np.full_like(tokens, 20.0)[:, None], np.zeros(1))
    spent = whole.moments(rest.left).mean(axis=0)
    np.testing.assert_allclose(rest.seconds[:, 0], whole.seconds - spent, rtol=1e-9)
    ended = np.sort(lengths)
    for left, kv in zip(rest.left, rest.kv_tokens, strict=True):
        assert kv == pytest.approx(left * (20 + ended[len(lengths) - left - 1]))


@given(
    st.lists(st.integers(1, 300), min_size=3, max_size=8),
    st.floats(0.0, 0.5),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_it_is_the_best_of_all_plans(lengths, cost_s, switches):
    rest = Rest.of(DECODE, (1, 2), 2, np.array([lengths], float), np.full(len(lengths), 10.0))
    later = Later.up_to(rest, lambda a, b: np.full(len(rest.left), cost_s * b), switches, margin=0.1)[-1]
    spans = -np.diff(rest.seconds, axis=0, append=0.0)
    for g, start in itertools.product(range(len(rest.left)), (0, 1)):
        best = (np.inf, np.inf)
        # Every way through the moments from g on whose first step is a switch.
        for path in itertools.product((0, 1), repeat=len(rest.left) - g):
            changes = [(a, b) for a, b in itertools.pairwise((start, *path)) if a != b]
            if path[0] != start and len(changes) <= switches:
                paid = sum(cost_s * (1, 2)[b] for _, b in changes)
                seconds = sum(spans[g + i, tp] for i, tp in enumerate(path))
                best = min(best, (seconds + 1.1 * paid, paid))
        assert later.seconds[g, start] == pytest.approx(best[0])
        if np.isfinite(best[0]) and cost_s > 1e-3:
            assert later.cost_s[g, start] == pytest.approx(best[1], abs=1e-6) or later.seconds[g, start] == best[0]
