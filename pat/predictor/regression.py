"""Non-negative least squares on relative errors, and the monotone curves that it fits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from scipy.optimize import nnls

# Beyond this relative error a sample counts by its error, not by its square (Huber): the machine may have
# been disturbed for all of a shape.  It takes some rounds of reweighting.
HUBER = 0.02
ROUNDS = 10
# Breaks the tie between columns that the samples cannot tell apart, in favour of the first (fixed) one.
SHRINK = 1e-6


@dataclass(frozen=True)
class Curve:
    """Non-decreasing piecewise linear function: constant before the first knot, the last slope kept after."""

    knots: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Values at `x`, of the same shape."""
        y = np.interp(x, self.knots, self.values)
        if len(self.knots) == 1:
            return y
        slope = (self.values[-1] - self.values[-2]) / (self.knots[-1] - self.knots[-2])
        return y + slope * np.maximum(np.asarray(x) - self.knots[-1], 0.0)

    @classmethod
    def from_increments(cls, knots: Sequence[float], increments: np.ndarray, start: float = 0.0) -> "Curve":
        """The curve that starts at `start` and rises by `increments` (len(knots) - 1) between knots."""
        return cls(tuple(map(float, knots)), tuple(float(v) for v in start + np.r_[0.0, np.cumsum(increments)]))


@dataclass(frozen=True)
class Surface:
    """Piecewise bilinear function of two variables, non-decreasing in each, constant beyond its knots."""

    x_knots: tuple[float, ...]
    y_knots: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]  # by x, then y

    def __call__(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Values at `x`, `y`, which broadcast."""
        values = np.asarray(self.values)
        i, u = _position(x, self.x_knots)
        j, v = _position(y, self.y_knots)
        low = values[i, j] * (1 - v) + values[i, j + 1] * v
        high = values[i + 1, j] * (1 - v) + values[i + 1, j + 1] * v
        return low * (1 - u) + high * u

    @classmethod
    def from_steps(cls, x_knots: Sequence[float], y_knots: Sequence[float], coefficients: np.ndarray) -> "Surface":
        """The surface of `coefficients` of the features `steps` with the same knots."""
        x, y = (np.tri(len(knots), len(knots) - 1, -1) for knots in (x_knots, y_knots))
        both, either = np.reshape(coefficients, (2, x.shape[1], y.shape[1]))
        values = x @ both @ y.T + (x @ either).sum(1)[:, None] + (either @ y.T).sum(0) - x @ either @ y.T
        return cls(tuple(map(float, x_knots)), tuple(map(float, y_knots)), tuple(map(tuple, values.tolist())))


def _position(x: np.ndarray, knots: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Index of the knot below x (of a segment), and the share of the segment below x."""
    position = np.interp(x, knots, np.arange(len(knots)))
    index = np.minimum(position.astype(int), len(knots) - 2)
    return index, position - index


def steps(x: np.ndarray, x_knots: Sequence[float], y: np.ndarray, y_knots: Sequence[float]) -> np.ndarray:
    """Features (len(x), 2 (len(x_knots) - 1) (len(y_knots) - 1)) that add up to a `Surface` if none is negative.

    Two for each pair of segments: one rises where x AND y have passed theirs, one where x OR y has. Both are
    non-decreasing in x and in y; the first says that the two together cost more than each, the second less.
    """
    p, q = (np.minimum(increments(z, knots), 1.0) for z, knots in ((x, x_knots), (y, y_knots)))
    both = p[:, :, None] * q[:, None, :]
    either = p[:, :, None] + q[:, None, :] - both
    return np.hstack([both.reshape(len(p), -1), either.reshape(len(p), -1)])


def increments(x: np.ndarray, knots: Sequence[float]) -> np.ndarray:
    """Features (len(x), len(knots) - 1): the share of each segment below x; the last one runs on."""
    low, high = np.asarray(knots[:-1], float), np.asarray(knots[1:], float)
    shares = np.maximum((np.asarray(x, float)[:, None] - low) / (high - low), 0.0)
    shares[:, :-1] = np.minimum(shares[:, :-1], 1.0)
    return shares


def fit_relative(features: np.ndarray, seconds: np.ndarray, trust: np.ndarray | None = None) -> np.ndarray:
    """Coefficients >= 0, (columns,), with the least (Huber) RELATIVE error of features @ coefficients.

    features: (samples, columns), the first column being the fixed part.  seconds: (samples,), all > 0.
    trust: (samples,) how much each counts, 0..1; all alike if left out.
    Few samples are enough: what they cannot tell apart goes to the fixed part.
    """
    if len(seconds) == 0 or not np.all(seconds > 0):
        raise ValueError(f"a fit needs samples with positive seconds, got {seconds.tolist()}")
    relative = features / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    shrink = np.sqrt(SHRINK) * np.eye(features.shape[1])[1:]
    trust = np.ones(len(seconds)) if trust is None else np.sqrt(trust)
    weight = trust
    for _ in range(ROUNDS):
        rows = np.vstack([weight[:, None] * relative / scale, shrink])
        coefficients = nnls(rows, np.r_[weight, np.zeros(len(shrink))])[0] / scale
        error = np.abs(relative @ coefficients - 1)
        weight = trust * np.sqrt(HUBER / np.maximum(error, HUBER))
    return coefficients


def bucket(tokens: pl.Expr) -> pl.Expr:
    """Half-octave bucket of a token count: steps add tokens, so contexts of one shape differ."""
    return (tokens.clip(lower_bound=1).log(2.0) * 2).round().cast(pl.Int64)
