"""Seconds that one change of tp takes, fitted to the profile's switches."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from pat.predictor.regression import bucket, fit_relative

MODES = ("migrate", "recompute")
# A pair with this many shapes also tells from how many requests on all ranks share the work.
DENSE_SHAPES = 30
SPREADS = (1, 2, 4, 8)


class SwitchCost(NamedTuple):
    """Cost of one kind of switch: seconds, seconds a request, seconds a KV token.

    spread: with fewer requests than this, some ranks have none, and a token costs spread / requests as much.
    """

    fixed: float
    per_request: float
    per_token: float
    spread: int = 1


@dataclass(frozen=True)
class SwitchModel:
    """Cost of every profiled (tp_from, tp_to, mode), all phases and the prefill that re-admits the requests.

    Migration moves KV bytes, which are proportional to its tokens; recomputation prefills the same tokens.
    """

    costs: dict[tuple[int, int, str], SwitchCost]

    def modes(self, tp_from: int, tp_to: int) -> tuple[str, ...]:
        """The KV modes that are known for this pair; empty when the pair was not profiled."""
        return tuple(mode for mode in MODES if (tp_from, tp_to, mode) in self.costs)

    def seconds(self, tp_from: int, tp_to: int, requests: np.ndarray, kv_tokens: np.ndarray, mode: str) -> np.ndarray:
        """Seconds from the decision to the first decode step in the new layout; arguments broadcast.

        requests: those whose KV is moved or recomputed.  kv_tokens: their tokens in KV, together.
        ValueError when the profile has no such switch.
        """
        cost = self.costs.get((tp_from, tp_to, mode))
        if cost is None:
            known = ", ".join(f"{a}->{b} {m}" for a, b, m in sorted(self.costs)) or "none"
            raise ValueError(f"no switch cost for {tp_from}->{tp_to} {mode}: the profile has {known}")
        tokens = _busy(requests, kv_tokens, cost.spread)
        return cost.fixed + cost.per_request * np.asarray(requests) + cost.per_token * tokens

    @classmethod
    def fit(cls, samples: pl.DataFrame) -> "SwitchModel":
        """Fit to rows (tp_from, tp_to, mode, requests, kv_tokens, total_s), one a switch.

        One row a pair is enough for a fixed cost; rows at several sizes separate the parts.  A switch costs
        seconds to measure, so there are few rows: the modes of a pair, which differ in what they do with a
        token, share the fixed part and the part per request.
        """
        costs = {}
        for pair, shapes in switch_shapes(samples).group_by("tp_from", "tp_to", maintain_order=True):
            modes = shapes["mode"].unique(maintain_order=True).to_list()
            spreads = SPREADS if len(shapes) >= DENSE_SHAPES else (1,)
            fits = (_fit(shapes, modes, chosen) for chosen in itertools.product(spreads, repeat=len(modes)))
            _, fitted = min(fits, key=lambda fit: fit[0])
            costs |= {(*pair, mode): cost for mode, cost in zip(modes, fitted, strict=True)}
        return cls(costs)


def _busy(requests: np.ndarray, kv_tokens: np.ndarray, spread: int) -> np.ndarray:
    """KV tokens, counted as often as ranks are left idle by fewer than `spread` requests."""
    return np.asarray(kv_tokens) * np.maximum(spread / np.maximum(requests, 1), 1.0)


def _fit(shapes: pl.DataFrame, modes: list[str], spreads: tuple[int, ...]) -> tuple[float, list[SwitchCost]]:
    """Mean relative error, and the cost of each of `modes`, if they have these spreads."""
    requests, total = shapes["requests"].to_numpy(), shapes["total_s"].to_numpy()
    tokens = [
        _busy(requests, (shapes["kv_tokens"] * (shapes["mode"] == mode)).to_numpy(), spread)
        for mode, spread in zip(modes, spreads, strict=True)
    ]
    features = np.stack([np.ones(len(shapes)), requests, *tokens], axis=1)
    fitted = fit_relative(features, total)
    fixed, per_request, *per_token = map(float, fitted)
    costs = [SwitchCost(fixed, per_request, rate, spread) for rate, spread in zip(per_token, spreads, strict=True)]
    return float(np.abs(features @ fitted / total - 1).mean()), costs


def switch_shapes(samples: pl.DataFrame) -> pl.DataFrame:
    """Median of the repeats of each (tp_from, tp_to, mode, requests, bucket of KV tokens)."""
    shape = ["tp_from", "tp_to", "mode", "requests", bucket(pl.col("kv_tokens")).alias("bucket")]
    medians = samples.group_by(shape).agg(pl.col("kv_tokens", "total_s").median())
    return medians.sort("tp_from", "tp_to", "mode", "requests", "bucket")
