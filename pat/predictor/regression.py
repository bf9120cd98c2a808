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


def increments(x: np.ndarray, knots: Sequence[float]) -> np.ndarray:
    """Features (len(x), len(knots) - 1): the share of each segment below x; the last one runs on."""
    low, high = np.asarray(knots[:-1], float), np.asarray(knots[1:], float)
    shares = np.maximum((np.asarray(x, float)[:, None] - low) / (high - low), 0.0)
    shares[:, :-1] = np.minimum(shares[:, :-1], 1.0)
    return shares


def fit_relative(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients >= 0, (columns,), with the least (Huber) RELATIVE error of features @ coefficients.

    features: (samples, columns), the first column being the fixed part.  seconds: (samples,), all > 0.
    Few samples are enough: what they cannot tell apart goes to the fixed part.
    """
    if len(seconds) == 0 or not np.all(seconds > 0):
        raise ValueError(f"a fit needs samples with positive seconds, got {seconds.tolist()}")
    relative = features / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    shrink = np.sqrt(SHRINK) * np.eye(features.shape[1])[1:]
    weight = np.ones(len(seconds))
    for _ in range(ROUNDS):
        rows = np.vstack([weight[:, None] * relative / scale, shrink])
        coefficients = nnls(rows, np.r_[weight, np.zeros(len(shrink))])[0] / scale
        error = np.abs(relative @ coefficients - 1)
        weight = np.sqrt(HUBER / np.maximum(error, HUBER))
    return coefficients


def bucket(tokens: pl.Expr) -> pl.Expr:
    """Half-octave bucket of a token count: steps add tokens, so contexts of one shape differ."""
    return (tokens.clip(lower_bound=1).log(2.0) * 2).round().cast(pl.Int64)
