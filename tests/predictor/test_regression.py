import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat.predictor.regression import Curve, Surface, fit_relative, increments, steps

KNOTS = st.lists(st.integers(0, 1000), min_size=2, max_size=6, unique=True).map(sorted)


@given(KNOTS, st.data())
def test_a_curve_is_the_sum_of_its_increments_inside_and_beyond_its_knots(knots, data):
    rises = np.array(data.draw(st.lists(st.floats(0, 10), min_size=len(knots) - 1, max_size=len(knots) - 1)))
    x = np.linspace(0, 3000, 301)
    curve = Curve.from_increments(knots, rises, start=2.0)
    np.testing.assert_allclose(curve(x), 2.0 + increments(x, knots) @ rises, rtol=1e-9)
    assert np.all(np.diff(curve(x)) >= -1e-9)


def test_a_curve_of_one_knot_is_constant():
    assert Curve((4.0,), (0.5,))(np.array([1, 4, 100])).tolist() == [0.5, 0.5, 0.5]


@given(KNOTS, KNOTS, st.data())
def test_a_surface_is_the_sum_of_its_steps_and_grows_in_both_directions(x_knots, y_knots, data):
    count = 2 * (len(x_knots) - 1) * (len(y_knots) - 1)
    coefficients = np.array(data.draw(st.lists(st.floats(0, 10), min_size=count, max_size=count)))
    surface = Surface.from_steps(x_knots, y_knots, coefficients)
    x, y = (part.ravel() for part in np.meshgrid(np.linspace(0, 1500, 31), np.linspace(0, 1500, 29)))
    expected = steps(x, x_knots, y, y_knots) @ coefficients
    np.testing.assert_allclose(surface(x, y), expected, rtol=1e-9, atol=1e-9)
    grid = surface(np.linspace(0, 1500, 40)[:, None], np.linspace(0, 1500, 40)[None])
    assert np.all(np.diff(grid, axis=0) >= -1e-9)
    assert np.all(np.diff(grid, axis=1) >= -1e-9)


def test_coefficients_are_recovered():
    features = np.array([[1, 1, 10], [1, 2, 20], [1, 4, 300], [1, 8, 10], [1, 8, 4000]], float)
    truth = np.array([0.05, 0.008, 1e-5])
    np.testing.assert_allclose(fit_relative(features, features @ truth), truth, rtol=1e-3)


def test_small_and_large_samples_weigh_the_same():
    # One constant for 1 and 100: the absolute error would be least anywhere between, the relative one at 1.
    assert fit_relative(np.ones((2, 1)), np.array([1.0, 100.0]))[0] == pytest.approx(1.01, abs=0.01)


def test_a_falling_trend_is_not_followed():
    features = np.array([[1, 1], [1, 8]], float)
    fixed, slope = fit_relative(features, np.array([2.0, 1.0]))
    assert slope == 0
    assert 1 <= fixed <= 2


def test_what_samples_cannot_tell_apart_is_a_fixed_cost():
    assert fit_relative(np.array([[1, 4, 800]], float), np.array([0.6])) == pytest.approx([0.6, 0, 0], rel=1e-3)


@pytest.mark.parametrize("seconds", [[], [0.1, 0.0]])
def test_seconds_must_be_positive(seconds):
    with pytest.raises(ValueError, match="positive seconds"):
        fit_relative(np.ones((len(seconds), 1)), np.array(seconds))


def test_samples_of_little_trust_count_little():
    features = np.ones((4, 1))
    seconds = np.array([1.0, 1.0, 1.0, 1.02])
    even = fit_relative(features, seconds)[0]
    assert fit_relative(features, seconds, np.array([1, 1, 1, 0.01]))[0] < even
