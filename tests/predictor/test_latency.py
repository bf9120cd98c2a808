import itertools
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.predictor.latency import DecodeModel, PrefillModel, decode_shapes

DECODE = ["tp", "batch", "context", "seconds"]


def cpu_step(tp, batch, context):
    fixed, per_request, per_token = {1: (0.064, 0.009, 1.2e-5), 2: (0.049, 0.006, 7e-6)}[tp]
    return fixed + per_request * batch + per_token * context


def decode_samples(step, batches=(1, 2, 4, 8), contexts=(32, 192), steps=24, noise=lambda: 1.0):
    rows = [
        (tp, batch, batch * (context + i), step(tp, batch, batch * (context + i)) * noise())
        for tp, batch, context, i in itertools.product((1, 2), batches, contexts, range(steps))
    ]
    return pl.DataFrame(rows, schema=DECODE, orient="row")


@pytest.mark.parametrize("tp", [1, 2])
def test_decode_recovers_a_linear_machine_and_extrapolates_it(tp):
    model = DecodeModel.fit(decode_samples(cpu_step))
    batch, context = np.array([1, 3, 8, 16]), np.array([50, 300, 1000, 8000])
    np.testing.assert_allclose(model.seconds(tp, batch, context), cpu_step(tp, batch, context), rtol=0.01)


def test_decode_follows_the_stairs_of_a_gpu():
    def step(tp, batch, context):
        return (0.005 if batch <= 8 else 0.0065 if batch <= 16 else 0.011) / tp + 1e-9 * context

    model = DecodeModel.fit(decode_samples(step, batches=(1, 4, 8, 9, 16, 17, 32), contexts=(1000, 2000, 4000)))
    for batch in (1, 8, 9, 16, 17, 32):
        assert model.seconds(1, batch, 3000 * batch) == pytest.approx(step(1, batch, 3000 * batch), rel=0.01)


def test_disturbed_steps_do_not_pull_the_fit():
    rng = np.random.default_rng(0)
    noisy = decode_samples(cpu_step, noise=lambda: rng.choice([1.0, 3.0], p=[0.8, 0.2]))
    model = DecodeModel.fit(noisy)
    assert model.seconds(1, 4, 500) == pytest.approx(cpu_step(1, 4, 500), rel=0.02)


SAMPLES = st.lists(
    st.tuples(st.just(1), st.integers(1, 64), st.integers(1, 10_000), st.floats(1e-3, 1)),
    min_size=1,
    max_size=40,
)


@given(SAMPLES)
@settings(max_examples=60, deadline=None)
def test_decode_never_gets_cheaper_with_more_requests_or_context(rows):
    model = replace(DecodeModel.fit(pl.DataFrame(rows, schema=DECODE, orient="row")), tiles={})
    grid = model.seconds(1, np.arange(1, 100)[:, None], np.linspace(0, 30_000, 50)[None])
    assert grid.shape == (99, 50)
    assert np.all(grid >= 0)
    assert np.all(np.diff(grid, axis=0) >= -1e-12)
    assert np.all(np.diff(grid, axis=1) >= -1e-12)


def tiled_step(tp, batch, context):
    return cpu_step(tp, batch, context) * (1.4 if batch == 3 else 1.0)


def test_a_batch_of_a_bad_kernel_tile_is_slower_than_a_larger_one():
    samples = decode_samples(tiled_step, batches=(1, 2, 3, 4, 8), contexts=(32, 100, 320, 1000))
    model = DecodeModel.fit(samples)
    assert set(model.tiles[1]) == {3}
    for batch in (1, 2, 3, 4, 6, 8):
        assert model.seconds(1, batch, 200 * batch) == pytest.approx(tiled_step(1, batch, 200 * batch), rel=0.04)
    several = model.seconds(1, np.array([2, 3, 4]), np.array([400, 600, 800]))
    assert several[1] > several[2] > several[0]
    assert not DecodeModel.fit(decode_samples(cpu_step, batches=(1, 2, 3, 4, 8))).tiles


def gathering_step(tp, batch, context):
    """Attention that few long requests keep from using the whole machine: twice the time up to 8 requests."""
    return (0.01 + 1e-7 * context * (2 if batch <= 8 else 1)) / tp


def dense(step):
    batches = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
    return decode_samples(step, batches, [round(2 ** (k / 2)) for k in range(12, 30)], steps=1)


def test_a_dense_profile_tells_few_long_requests_from_many_short_ones():
    model = DecodeModel.fit(dense(gathering_step))
    assert set(model.by_both) == {1, 2}
    grid = [(1, b, b * c) for b in (2, 5, 14, 28, 56, 110) for c in (300, 3000, 14000)]
    errors = [abs(model.seconds(*shape) / gathering_step(*shape) - 1) for shape in grid]
    assert np.median(errors) < 0.02
    few, many = model.seconds(1, 4, 4 * 16384), model.seconds(1, 64, 64 * 1024)
    assert few > many * 1.3  # 1.39, for as many tokens


def test_a_dense_profile_that_two_curves_describe_gets_no_surface():
    assert not DecodeModel.fit(dense(cpu_step)).by_both


@given(st.lists(st.floats(0.5, 2), min_size=18, max_size=18))
@settings(max_examples=10, deadline=None)
def test_with_a_surface_more_requests_or_longer_ones_still_cost_more(factors):
    noisy = dense(lambda tp, b, c: gathering_step(tp, b, c) * factors[(b * 7 + c) % 18])
    model = replace(DecodeModel.fit(noisy), tiles={})
    assert model.by_both
    batch, length = np.arange(1, 200)[:, None], np.linspace(1, 30_000, 60)[None]
    grid = model.seconds(1, batch, batch * length)
    assert np.all(np.diff(grid, axis=0) >= -1e-9)
    assert np.all(np.diff(grid, axis=1) >= -1e-9)


def test_steps_of_a_growing_context_are_one_shape():
    shapes = decode_shapes(decode_samples(cpu_step, batches=(4,), contexts=(195,), steps=10))
    assert shapes.select("tp", "batch", "context").rows() == [(1, 4, 4 * 199.5), (2, 4, 4 * 199.5)]


def test_an_unprofiled_tp_is_named():
    model = DecodeModel.fit(decode_samples(cpu_step))
    with pytest.raises(ValueError, match="no decode latency for tp 4: the profile has tp 1, 2"):
        model.seconds(4, 1, 1)


def prefill_step(requests, tokens, prefix):
    return 0.05 + 0.002 * requests + 9e-4 * tokens + 2e-7 * tokens * (prefix + tokens / 2) / requests


@pytest.fixture(scope="module")
def prefill():
    grid = itertools.product((1, 4), (16, 64, 192), (0, 128))
    shapes = [(1, r, r * t, r * p, prefill_step(r, r * t, r * p)) for r, t, p in grid]
    schema = ["tp", "requests", "tokens", "prefix", "seconds"]
    return PrefillModel.fit(pl.DataFrame(shapes, schema=schema, orient="row"))


def test_prefill_recovers_a_machine(prefill):
    for requests, tokens, prefix in [(1, 100, 0), (2, 200, 100), (4, 700, 600), (8, 1600, 0)]:
        expected = prefill_step(requests, tokens, prefix)
        assert prefill.seconds(1, requests, tokens, prefix) == pytest.approx(expected, rel=0.03)


@given(st.integers(1, 8), st.integers(1, 4000), st.integers(0, 4000), st.integers(1, 500))
def test_prefill_grows_with_tokens_and_prefix(prefill, requests, tokens, prefix, more):
    prefill = replace(prefill, rates={1: (*prefill.rates[1][:4], 0.0)})  # but for tiles
    now = prefill.seconds(1, requests, tokens, prefix)
    assert prefill.seconds(1, requests, tokens + more, prefix) >= now
    assert prefill.seconds(1, requests, tokens, prefix + more) >= now


def fit_prefill(step, shapes):
    rows = [(1, *shape, step(*shape)) for shape in shapes]
    return PrefillModel.fit(pl.DataFrame(rows, schema=["tp", "requests", "tokens", "prefix", "seconds"], orient="row"))


def test_prefill_of_a_kernel_that_works_out_cached_tokens_again():
    def step(requests, tokens, prefix):
        return 0.01 + 5e-4 * tokens + 2e-8 * (prefix + tokens) ** 2 / requests

    cached = [(r, r, r * p) for r, p in itertools.product((1, 2, 4, 8, 16, 32), (63, 255, 575))]
    fresh = [(r, r * t, 0) for r, t in itertools.product((1, 4, 16), (64, 256, 576))]
    model = fit_prefill(step, cached + fresh)
    for shape in [(3, 3, 3 * 400), (24, 24, 24 * 575), (24, 24, 24 * 100), (8, 8 * 128, 0), (2, 2 * 100, 2 * 500)]:
        assert model.seconds(1, *shape) == pytest.approx(step(*shape), rel=0.03)


def test_prefill_follows_a_step_at_few_tokens():
    def step(requests, tokens, prefix):  # one row is a matrix times a vector
        return (0.012 if tokens == 1 else 0.02) + 5e-4 * tokens + 1e-6 * prefix

    cached = [(r, r, r * p) for r, p in itertools.product((1, 2, 3, 4, 8, 16, 32), (16, 63, 128, 255, 575))]
    model = fit_prefill(step, [*cached, *((1, tokens, 0) for tokens in (64, 100, 128, 256, 576))])
    for shape in [(1, 1, 300), (2, 2, 200), (4, 4, 1000), (24, 24, 2400), (1, 200, 0)]:
        assert model.seconds(1, *shape) == pytest.approx(step(*shape), rel=0.03)


def test_prefill_that_does_not_fill_the_tiles_takes_longer():
    def step(requests, tokens, prefix):
        return 0.02 + (0.004 if tokens % 4 else 0.0) + 5e-4 * tokens + 1e-6 * prefix

    cached = [(r, r, r * p) for r, p in itertools.product((2, 3, 4, 7, 8, 15, 16, 31, 32), (63, 255))]
    model = fit_prefill(step, [*cached, *((1, tokens, 0) for tokens in (63, 64, 127, 128, 255, 256))])
    for shape in [(5, 5, 400), (6, 6, 600), (12, 12, 1200), (20, 20, 2000), (1, 100, 0), (1, 90, 0)]:
        assert model.seconds(1, *shape) == pytest.approx(step(*shape), rel=0.03)
