import logging

import numpy as np
import pytest

from pat.predictor.drift import ENOUGH, WINDOW, DriftGuard
from pat.predictor.latency import DecodeModel
from pat.predictor.regression import Curve

DECODE = DecodeModel(
    {tp: Curve((0, 100), (0.01, 0.11)) for tp in (1, 2, 4)}, {tp: Curve((0, 1), (0, 0)) for tp in (1, 2, 4)}
)
SHAPE = (np.array([3, 40]), np.array([300, 9000]))


def steps(factor, count=ENOUGH):
    """Decode steps that take ``factor`` times as long as predicted."""
    batch = 1 + np.arange(count) % 7
    return batch, 50 * batch, DECODE.seconds(1, batch, 50 * batch) * factor


def test_predictions_follow_what_is_seen_and_other_sizes_follow_it():
    guard = DriftGuard(DECODE)
    guard.observe(1, *steps(1.5, ENOUGH - 1))
    assert guard.scales == {}
    np.testing.assert_allclose(guard.seconds(1, *SHAPE), DECODE.seconds(1, *SHAPE))
    guard.observe(1, *steps(1.5, 1))
    guard.observe(2, *steps(1.2))
    expected = {1: 1.5, 2: 1.2, 4: (1.5 * 1.2) ** 0.5}
    for tp, factor in expected.items():
        np.testing.assert_allclose(guard.seconds(tp, *SHAPE), DECODE.seconds(tp, *SHAPE) * factor)
    assert guard.scales == pytest.approx({1: 1.5, 2: 1.2})
    assert guard.trusted


def test_the_latest_steps_count():
    guard = DriftGuard(DECODE)
    guard.observe(1, *steps(2.0, WINDOW))
    guard.observe(1, *steps(1.0, WINDOW // 2 + 1))
    assert guard.scales[1] == pytest.approx(1.0)


def test_a_few_slow_steps_change_nothing():
    guard = DriftGuard(DECODE)
    guard.observe(1, *steps(1.1, 80))
    guard.observe(1, *steps(9.0, 10))
    assert guard.scales[1] == pytest.approx(1.1)
    assert guard.trusted


@pytest.mark.parametrize("factor", [4.0, 0.2, np.tile([1.0, 2.5], ENOUGH)])
def test_what_no_scale_puts_right_is_not_trusted_until_it_ends(factor, caplog):
    guard = DriftGuard(DECODE)
    count = 2 * ENOUGH
    with caplog.at_level(logging.WARNING):
        guard.observe(2, *steps(factor, count))
        guard.observe(2, *steps(factor, count))
    assert not guard.trusted
    (message,) = [record.getMessage() for record in caplog.records]  # once
    assert "decode steps at tp 2 take" in message and "make the profile again" in message
    guard.observe(2, *steps(1.0, WINDOW))
    assert guard.trusted


def test_a_size_that_was_not_profiled_and_no_steps_are_passed_over():
    guard = DriftGuard(DECODE)
    guard.observe(8, *steps(2.0))
    guard.observe(1, *(np.array([]),) * 3)
    assert guard.scales == {}
