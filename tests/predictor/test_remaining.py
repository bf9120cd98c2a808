import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.predictor.latency import DecodeModel
from pat.predictor.regression import Curve
from pat.predictor.remaining import deal_evenly, drain, slots, stratified_draws, take

DECODE = DecodeModel({1: Curve((1, 8, 16), (0.07, 0.13, 0.26))}, {1: Curve((0, 1000), (0, 0.012))})
REQUEST = st.tuples(st.integers(1, 60), st.integers(1, 500))  # tokens, context
REQUESTS = st.lists(REQUEST, min_size=2, max_size=10)
UNTIED = st.lists(REQUEST, min_size=2, max_size=10, unique_by=lambda request: request[0])


def arrays(requests):
    """One scenario, one replica: tokens and context (1, 1, w)."""
    return np.array(requests, float).T[:, None, None, :]


def step_by_step(requests):
    """Seconds at which each request ends, in the order of `requests`, by running every step."""
    seconds, ends = 0.0, {}
    for step in range(max(n for n, _ in requests)):
        live = [(n, c) for n, c in requests if n > step]
        # The token of this step is in KV half of it on average.
        context = sum(c + step + 0.5 for _, c in live)
        seconds += float(DECODE.seconds(1, len(live), context))
        ends[step + 1] = seconds
    return [ends[n] for n, _ in requests]


@given(REQUESTS)
@settings(max_examples=50, deadline=None)
def test_drain_equals_running_every_step(requests):
    run = drain(DECODE, 1, *arrays(requests), start=np.zeros(1))
    expected = sorted(step_by_step(requests))
    np.testing.assert_allclose(run.ends[0, 0], expected, rtol=1e-9)
    assert run.seconds == pytest.approx([expected[-1]])


@given(UNTIED, st.data())
@settings(max_examples=50, deadline=None)
def test_stopping_half_way_and_going_on_takes_as_long(requests, data):
    left = data.draw(st.integers(1, len(requests) - 1))
    start = np.array([0.5])
    run = drain(DECODE, 1, *arrays(requests), start=start)
    moment, tokens, context = run.until(left)
    rest = drain(DECODE, 1, tokens[:, None], context[:, None], start=np.zeros(1))
    np.testing.assert_allclose(moment + rest.seconds, run.seconds, rtol=1e-9)
    # No token is lost or made up: what will be in KV at the end is the same.
    longest = sorted(requests)[-left:]
    np.testing.assert_allclose(np.sort(tokens + context)[0], sorted(n + c for n, c in longest))


def test_replicas_of_different_speed_stop_at_the_same_moment():
    tokens = np.array([[[10.0, 40.0], [0.0, 100.0]]])
    run = drain(DECODE, 1, tokens, np.full_like(tokens, 50.0), start=np.zeros(2))
    moment, rest, context = run.until(1)
    assert moment == pytest.approx(run.ends[0, 0, 1])  # the second of three ends
    assert context[0, 0] + rest[0, 0] == pytest.approx(150)
    alone = drain(DECODE, 1, np.array([[[100 - rest[0, 0]]]]), np.array([[[50.0]]]), start=np.zeros(1))
    # Within a segment every step counts the same, though the later ones have more context.
    assert alone.seconds == pytest.approx(moment, rel=0.01)


def test_requests_that_end_together_leave_nothing():
    tokens = np.full((1, 1, 4), 20.0)
    _, rest, _ = drain(DECODE, 1, tokens, tokens, start=np.zeros(1)).until(2)
    assert rest.tolist() == [[0, 0]]


@given(UNTIED)
@settings(max_examples=50, deadline=None)
def test_moments_are_when_so_many_are_left(requests):
    run = drain(DECODE, 1, *arrays(requests), start=np.array([0.5]))
    left = np.arange(len(requests) - 1, 0, -1)
    ends = sorted(step_by_step(requests))
    np.testing.assert_allclose(run.moments(left)[0], [0.5 + ends[len(requests) - n - 1] for n in left], rtol=1e-9)


def test_moments_look_at_all_replicas():
    tokens = np.array([[[10.0, 40.0], [0.0, 100.0]]])
    run = drain(DECODE, 1, tokens, np.full_like(tokens, 50.0), start=np.array([0.0, 0.2]))
    assert run.moments(np.array([2, 1]))[0] == pytest.approx([run.ends[0, 0, 0], run.ends[0, 0, 1]])
    assert run.seconds == pytest.approx([0.2 + run.ends[0, 1, 1]])


def test_an_idle_replica_takes_no_time():
    tokens = np.array([[[0.0, 5.0], [0.0, 0.0]]])
    run = drain(DECODE, 1, tokens, np.zeros_like(tokens), start=np.array([0.0, 9.0]))
    assert run.seconds == pytest.approx(run.ends[0, 0, -1:])


@given(st.integers(1, 20), st.integers(1, 4))
def test_dealing_keeps_every_request_and_evens_the_counts(live, replicas):
    tokens = np.random.default_rng(live).integers(1, 99, (3, live)).astype(float)
    dealt_tokens, dealt_context = deal_evenly(tokens, 1000 + tokens, replicas)
    assert dealt_tokens.shape == (3, replicas, -(-live // replicas))
    kept = dealt_context > 0
    np.testing.assert_array_equal(dealt_context[kept] - dealt_tokens[kept], 1000)
    np.testing.assert_array_equal(np.sort(dealt_tokens.reshape(3, -1))[:, -live:], np.sort(tokens))
    counts = kept.sum(axis=-1)
    assert np.all(counts.max(axis=-1) - counts.min(axis=-1) <= 1)


def test_slots_follow_the_owner_and_pad():
    layout = slots([0, 1, 0, 0], replicas=2)
    assert layout.tolist() == [[0, 2, 3], [1, -1, -1]]
    assert take(np.array([5, 6, 7, 8]), layout).tolist() == [[5, 7, 8], [6, 0, 0]]


def test_draws_fill_every_stratum_and_repeat():
    draws = stratified_draws(8, 5)
    np.testing.assert_array_equal(np.sort(np.floor(draws * 8), axis=0), np.tile(np.arange(8)[:, None], (1, 5)))
    stratified_draws.cache_clear()
    np.testing.assert_array_equal(draws, stratified_draws(8, 5))
