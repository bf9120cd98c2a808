"""Seconds of one engine step at each tp, fitted to the profile: decode and prefill."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from pat.predictor.regression import Curve, Surface, bucket, fit_relative, increments, steps

# A curve gets one more segment for this many distinct samples along its axis: a segment fitted to two noisy
# points gives a wild slope, and the last slope is what extrapolates.
SAMPLES_PER_SEGMENT = 12
MAX_SEGMENTS = 16
# A curve whose knots double has fewer to lose: none of its segments is narrow.
SAMPLES_PER_DOUBLING = 4
# A shape with fewer steps than this share of what is usual at its tp is not used.
MIN_SHARE = 0.5
# Rows of a tile: prefill steps of other multiples are told apart. One token is a matrix times a vector, see the knots.
ROWS = 4
# So many prefill steps of a shape make its median as good as any.
ENOUGH = 4
# With fewer cached lengths of a request (octaves, of more than a few tokens) a kernel's square could not be told from
# the causal scores.
CACHED_LENGTHS, FEW_CACHED = 2, 16
# A tp with this many shapes gets what few samples cannot bear: prefill a curve of the length of a request; decode a
# surface, if a sum of two curves misses one in ten of them by more than this.
DENSE_SHAPES, SUM_ERROR = 250, 0.04
SURFACE_SEGMENTS = 7
# A batch with at least so many shapes, all of them slower than the model by this share, has a bad kernel tile.
TILE_SHAPES, TILE = 2, 0.08


@dataclass(frozen=True)
class DecodeModel:
    """seconds(tp, batch, context) = f_tp(batch) + g_tp(context) + h_tp(batch, context / batch), none decreasing.

    f has a knot at every profiled batch, so it follows a CPU's straight line and a GPU's stairs alike; g is
    the attention over the KV cache, which reads every token of the batch once. h is left out but where a dense
    profile needs it: some attention kernels take longer for few long requests than for many short ones with as
    many tokens (Triton's on A100). So a step never gets cheaper with more context, nor with more requests like
    those that it has, but for tiles: single batches for which the matrix kernels have no good tile take longer than
    the next larger one (MKL's, three rows: a third). They are told from noise by being slow at every context.
    """

    by_batch: dict[int, Curve]
    by_context: dict[int, Curve]
    by_both: dict[int, Surface] = field(default_factory=dict)  # of batch and context a request
    tiles: dict[int, dict[int, float]] = field(default_factory=dict)  # seconds more at exactly that batch

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.by_batch))

    def seconds(self, tp: int, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds of one decode step of one replica; `batch` and `context` broadcast.

        batch: live requests of the replica.  context: tokens in KV, summed over these requests.
        Linear beyond what was profiled.  ValueError when the tp was not profiled.
        """
        require(tp, self.tp_sizes, "decode")
        seconds = self.by_batch[tp](batch) + self.by_context[tp](context)
        for size, more in self.tiles.get(tp, {}).items():
            seconds = seconds + more * (np.asarray(batch) == size)
        surface = self.by_both.get(tp)
        return seconds if surface is None else seconds + surface(batch, context / np.maximum(batch, 1))

    @classmethod
    def fit(cls, samples: pl.DataFrame) -> "DecodeModel":
        """Fit to rows (tp, batch, context, seconds), one a decode step."""
        by_batch, by_context, by_both, tiles = {}, {}, {}, {}
        for (tp,), shapes in decode_shapes(samples).group_by("tp", maintain_order=True):
            batch, context, seconds = (shapes[name].to_numpy() for name in ("batch", "context", "seconds"))
            batch_knots, context_knots = np.unique(batch), spread_knots(context)
            features = np.hstack(
                [np.ones((len(batch), 1)), increments(batch, batch_knots), increments(context, context_knots)]
            )
            fitted = fit_relative(features, seconds)
            rises, curves = len(batch_knots), features.shape[1]
            if len(shapes) >= DENSE_SHAPES and np.quantile(np.abs(features @ fitted / seconds - 1), 0.9) > SUM_ERROR:
                length = context / batch
                knots = octaves(batch), octaves(length)
                fitted = fit_relative(np.hstack([features, steps(batch, knots[0], length, knots[1])]), seconds)
                by_both[tp] = Surface.from_steps(*knots, fitted[curves:])
            by_batch[tp] = Curve.from_increments(batch_knots, fitted[1:rises], start=fitted[0])
            by_context[tp] = Curve.from_increments(context_knots, fitted[rises:curves])
            smooth = cls({tp: by_batch[tp]}, {tp: by_context[tp]}, {t: s for t, s in by_both.items() if t == tp})
            tiles[tp] = _tiles(batch, seconds, smooth.seconds(tp, batch, context))
        return cls(by_batch, by_context, by_both, {tp: found for tp, found in tiles.items() if found})


def _tiles(batch: np.ndarray, seconds: np.ndarray, smooth: np.ndarray) -> dict[int, float]:
    """Seconds by which a batch is slower than the non-decreasing model says, where it is so in all of its shapes.

    The next larger batch must be faster: else the model is at fault, and not a tile.
    """
    slower, sizes = {}, np.unique(batch)
    for size, larger in itertools.pairwise(sizes):
        own = batch == size
        a_tile = np.median(seconds[batch == larger]) < np.median(seconds[own])
        if a_tile and own.sum() >= TILE_SHAPES and np.all(seconds[own] > (1 + TILE) * smooth[own]):
            slower[int(size)] = float(np.median(seconds[own] - smooth[own]))
    return slower


@dataclass(frozen=True)
class PrefillModel:
    """seconds = fixed + a * requests + g(tokens) + b * prefix + c * scores + d * square + e * ragged + h(length).

    scores = tokens * (prefix + tokens / 2) / requests: the score matrix of causal attention, of requests
    that share tokens and prefix equally. square = (prefix + tokens)^2 / (2 * requests): the same of a kernel that
    works out the rows of cached tokens, too (SGLang's torch backend pads the queries to the cached length).
    ragged is 1 where tokens are no multiple of ROWS, the rows of a tile of the matrix kernels: then a step takes longer
    than with the next multiple (MKL's: by a sixth for few tokens). h(tokens / requests) is left out but where the
    profile is dense: attention kernels of GPUs take longer for one long request than for many short ones with as many
    tokens, before they are busy. So but for ragged a step never gets cheaper with more tokens.
    """

    by_tokens: dict[int, Curve]  # includes the fixed part
    # seconds per request, cached token, score, entry of square, and of a ragged step
    rates: dict[int, tuple[float, float, float, float, float]]
    by_length: dict[int, Curve] = field(default_factory=dict)  # of new tokens of a request

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.by_tokens))

    def seconds(self, tp: int, requests: np.ndarray, tokens: np.ndarray, prefix: np.ndarray) -> np.ndarray:
        """Seconds of one prefill step of one replica; arguments broadcast.

        requests: in the step (>= 1).  tokens: new ones, of all requests together.  prefix: tokens found in
        the KV cache, of all requests together.  Grows with tokens and prefix.  ValueError for an unknown tp.
        """
        require(tp, self.tp_sizes, "prefill")
        rates = zip(self.rates[tp], _loads(requests, tokens, prefix), strict=True)
        seconds = self.by_tokens[tp](tokens) + sum(rate * load for rate, load in rates)
        length = self.by_length.get(tp)
        return seconds if length is None else seconds + length(tokens / np.maximum(requests, 1))

    @classmethod
    def fit(cls, samples: pl.DataFrame) -> "PrefillModel":
        """Fit to rows (tp, requests, tokens, prefix, seconds), one a prefill step."""
        by_tokens, rates, by_length = {}, {}, {}
        for (tp,), shapes in prefill_shapes(samples).group_by("tp", maintain_order=True):
            columns = ("requests", "tokens", "prefix", "seconds")
            requests, tokens, prefix, seconds = (shapes[name].to_numpy() for name in columns)
            knots = doubling_knots(tokens)
            others = np.stack(_loads(requests, tokens, prefix), axis=1)
            cached = prefix / requests
            if len(np.unique(np.round(np.log2(cached[cached >= FEW_CACHED])))) < CACHED_LENGTHS:
                others[:, 3] = 0.0
            features = [np.ones((len(tokens), 1)), increments(tokens, knots), others]
            segments, lengths = len(knots) - 1, octaves(tokens / requests)
            if len(shapes) >= DENSE_SHAPES:
                features.append(np.minimum(increments(tokens / requests, lengths), 1.0))
            trust = np.minimum(shapes["steps"].to_numpy(), ENOUGH) / ENOUGH
            fixed, *rest = fit_relative(np.hstack(features), seconds, trust)
            by_tokens[tp] = Curve.from_increments(knots, rest[:segments], start=fixed)
            rates[tp] = tuple(map(float, rest[segments : segments + others.shape[1]]))
            if len(shapes) >= DENSE_SHAPES:
                rises = rest[segments + others.shape[1] :]
                by_length[tp] = Curve.from_increments(
                    [*lengths, 2 * lengths[-1]], [*rises, 0.0]
                )  # level after the last
        return cls(by_tokens, rates, by_length)


def _loads(requests: np.ndarray, tokens: np.ndarray, prefix: np.ndarray) -> tuple[np.ndarray, ...]:
    """What a prefill step costs in proportion to: requests, cached tokens, scores, square, ragged of `PrefillModel`."""
    requests, tokens, prefix = (np.asarray(values, float) for values in (requests, tokens, prefix))
    count = np.maximum(requests, 1)
    ragged = np.where(tokens % ROWS, 1.0, 0.0)
    return requests, prefix, tokens * (prefix + tokens / 2) / count, (prefix + tokens) ** 2 / (2 * count), ragged


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
    """Median of the steps of each shape (tp, requests, tokens, prefix), and how many there were.

    Prefill is seldom: many a shape came about once, on the way to something else.
    """
    shape = ["tp", "requests", "tokens", "prefix"]
    count = pl.col("steps").sum() if "steps" in samples.columns else pl.len().alias("steps")  # some may be medians
    return samples.group_by(shape).agg(pl.col("seconds").median(), count).sort(shape)


def spread_knots(x: np.ndarray) -> np.ndarray:
    """Knots from 0 to the largest x, as many as the samples can bear, each segment with as many samples."""
    distinct = np.unique(x)
    segments = int(np.clip(len(distinct) // SAMPLES_PER_SEGMENT, 1, MAX_SEGMENTS))
    inner = np.quantile(distinct, np.arange(1, segments) / segments)
    return np.unique(np.r_[0.0, inner, max(distinct[-1], 1)])


def doubling_knots(x: np.ndarray) -> np.ndarray:
    """Knots 0, 1, 2, 4, ... and the largest x, without those that would leave a segment too few samples.

    Few tokens are many of the shapes: a sample of a prompt whose KV is there needs one.
    """
    knots, largest = [0.0], max(x.max(), 1)
    for knot in 2.0 ** np.arange(np.ceil(np.log2(max(largest, 2)))):
        if ((x > knots[-1]) & (x <= knot)).sum() >= SAMPLES_PER_DOUBLING <= (x > knot).sum():
            knots.append(knot)
    return np.r_[knots, largest]


def octaves(x: np.ndarray) -> np.ndarray:
    """Knots from the smallest to the largest x (> 0), each the same multiple of the one before."""
    return np.geomspace(x.min(), max(x.max(), x.min() * 2), SURFACE_SEGMENTS + 1)


def require(tp: int, known: tuple[int, ...], what: str) -> None:
    if tp not in known:
        raise ValueError(f"no {what} latency for tp {tp}: the profile has tp {', '.join(map(str, known))}")
