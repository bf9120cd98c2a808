"""Seconds of one engine step at each tp, fitted to the profile: decode and prefill."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from pat.predictor.regression import Curve, bucket, fit_relative, increments

# A curve gets one more segment for this many distinct samples along its axis: a segment fitted to two noisy
# points gives a wild slope, and the last slope is what extrapolates.
SAMPLES_PER_SEGMENT = 12
MAX_SEGMENTS = 8
# A shape with fewer steps than this share of what is usual at its tp is not used.
MIN_SHARE = 0.5


@dataclass(frozen=True)
class DecodeModel:
    """seconds(tp, batch, context) = f_tp(batch) + g_tp(context), both curves non-decreasing.

    f has a knot at every profiled batch, so it follows a CPU's straight line and a GPU's stairs alike; g is
    the attention over the KV cache, which reads every token of the batch once.
    """

    by_batch: dict[int, Curve]
    by_context: dict[int, Curve]

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.by_batch))

    def seconds(self, tp: int, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds of one decode step of one replica; `batch` and `context` broadcast.

        batch: live requests of the replica.  context: tokens in KV, summed over these requests.
        Linear beyond what was profiled.  ValueError when the tp was not profiled.
        """
        require(tp, self.tp_sizes, "decode")
        return self.by_batch[tp](batch) + self.by_context[tp](context)

    @classmethod
    def fit(cls, samples: pl.DataFrame) -> "DecodeModel":
        """Fit to rows (tp, batch, context, seconds), one a decode step."""
        by_batch, by_context = {}, {}
        for (tp,), shapes in decode_shapes(samples).group_by("tp", maintain_order=True):
            batch, context, seconds = (shapes[name].to_numpy() for name in ("batch", "context", "seconds"))
            batch_knots, context_knots = np.unique(batch), spread_knots(context)
            features = [
                np.ones((len(batch), 1)),
                increments(batch, batch_knots),
                increments(context, context_knots),
            ]
            fixed, *rest = fit_relative(np.hstack(features), seconds)
            rises = len(batch_knots) - 1
            by_batch[tp] = Curve.from_increments(batch_knots, rest[:rises], start=fixed)
            by_context[tp] = Curve.from_increments(context_knots, rest[rises:])
        return cls(by_batch, by_context)


@dataclass(frozen=True)
class PrefillModel:
    """seconds = fixed + a * requests + g(tokens) + b * prefix + c * attention, one set of numbers a tp.

    attention = tokens * (prefix + tokens / 2) / requests: the score matrix of causal attention, of requests
    that share tokens and prefix equally.
    """

    by_tokens: dict[int, Curve]  # includes the fixed part
    rates: dict[int, tuple[float, float, float]]  # seconds per request, per cached token, per score

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.by_tokens))

    def seconds(self, tp: int, requests: np.ndarray, tokens: np.ndarray, prefix: np.ndarray) -> np.ndarray:
        """Seconds of one prefill step of one replica; arguments broadcast.

        requests: in the step (>= 1).  tokens: new ones, of all requests together.  prefix: tokens found in
        the KV cache, of all requests together.  Grows with tokens and prefix.  ValueError for an unknown tp.
        """
        require(tp, self.tp_sizes, "prefill")
        per_request, per_prefix, per_score = self.rates[tp]
        linear = self.by_tokens[tp](tokens) + per_request * requests + per_prefix * prefix
        return linear + per_score * scores(requests, tokens, prefix)

    @classmethod
    def fit(cls, samples: pl.DataFrame) -> "PrefillModel":
        """Fit to rows (tp, requests, tokens, prefix, seconds), one a prefill step."""
        by_tokens, rates = {}, {}
        for (tp,), shapes in prefill_shapes(samples).group_by("tp", maintain_order=True):
            columns = ("requests", "tokens", "prefix", "seconds")
            requests, tokens, prefix, seconds = (shapes[name].to_numpy() for name in columns)
            knots = spread_knots(tokens)
            others = np.stack([requests, prefix, scores(requests, tokens, prefix)], axis=1)
            features = [np.ones((len(tokens), 1)), increments(tokens, knots), others]
            fixed, *rest = fit_relative(np.hstack(features), seconds)
            by_tokens[tp] = Curve.from_increments(knots, rest[:-3], start=fixed)
            rates[tp] = tuple(map(float, rest[-3:]))
        return cls(by_tokens, rates)


def scores(requests: np.ndarray, tokens: np.ndarray, prefix: np.ndarray) -> np.ndarray:
    """Entries of the causal score matrix, summed over equal requests."""
    return np.asarray(tokens, float) * (prefix + np.asarray(tokens) / 2) / np.maximum(requests, 1)


def decode_shapes(samples: pl.DataFrame) -> pl.DataFrame:
    """Median of the steps of each shape (tp, batch, bucket of context a request).

    A median, so that steps disturbed by other work on the machine do not pull the fit.  A run of steps leaves
    a few of them in the bucket where it ends; too few for a median, they are dropped.
    """
    shape = ["tp", "batch", bucket(pl.col("context") / pl.col("batch")).alias("bucket")]
    shapes = samples.group_by(shape).agg(pl.col("context", "seconds").median(), pl.len().alias("steps"))
    enough = pl.col("steps") >= MIN_SHARE * pl.col("steps").median().over("tp")
    return shapes.filter(enough).drop("steps").sort("tp", "batch", "bucket")


def prefill_shapes(samples: pl.DataFrame) -> pl.DataFrame:
    """Median of the steps of each shape (tp, requests, tokens, prefix)."""
    shape = ["tp", "requests", "tokens", "prefix"]
    return samples.group_by(shape).agg(pl.col("seconds").median()).sort(shape)


def spread_knots(x: np.ndarray) -> np.ndarray:
    """Knots from 0 to the largest x, as many as the samples can bear, each segment with as many samples."""
    distinct = np.unique(x)
    segments = int(np.clip(len(distinct) // SAMPLES_PER_SEGMENT, 1, MAX_SEGMENTS))
    inner = np.quantile(distinct, np.arange(1, segments) / segments)
    return np.unique(np.r_[0.0, inner, max(distinct[-1], 1)])


def require(tp: int, known: tuple[int, ...], what: str) -> None:
    if tp not in known:
        raise ValueError(f"no {what} latency for tp {tp}: the profile has tp {', '.join(map(str, known))}")
