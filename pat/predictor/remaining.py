"""Remaining time of a generation stage under a layout, in many scenarios of remaining lengths at once.

Array axes: s scenarios, n live requests, r replicas, w requests of a replica (padded with requests that have
nothing left).  Times are seconds, lengths and contexts tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pat.predictor.latency import DecodeModel

SEED = 0


@lru_cache(maxsize=256)
def stratified_draws(scenarios: int, live: int) -> np.ndarray:
    """Uniform draws (s, n), one in each of s equal strata for every request; the same ones at each call."""
    rng = np.random.default_rng(SEED)
    strata = rng.permuted(np.tile(np.arange(scenarios), (live, 1)), axis=1).T
    return (strata + rng.random((scenarios, live))) / scenarios


def slots(owner: Sequence[int], replicas: int) -> np.ndarray:
    """Indices (r, w) of the requests of each replica, given the replica of each request; -1 pads."""
    members = [[i for i, o in enumerate(owner) if o == replica] for replica in range(replicas)]
    width = max(map(len, members))
    return np.array([row + [-1] * (width - len(row)) for row in members])


def take(values: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Values (s, n) or (n,) of the requests as (s, r, w) or (r, w), laid out by slots (r, w); 0 pads."""
    return np.concatenate([values, np.zeros((*values.shape[:-1], 1), values.dtype)], axis=-1)[..., slots]


@dataclass(frozen=True)
class Drain:
    """The run of every replica to its last token, its requests in the order in which they end."""

    tokens: np.ndarray  # (s, r, w) tokens that each request still generates, ascending along w
    context: np.ndarray  # (s, r, w) tokens that it has in KV now
    ends: np.ndarray  # (s, r, w) seconds of decoding until then
    start: np.ndarray  # (r,) seconds before the first decode step (prefill)

    @property
    def seconds(self) -> np.ndarray:
        """(s,) until the last replica has ended."""
        return np.where(self.tokens[..., -1] > 0, self.start + self.ends[..., -1], 0.0).max(axis=-1)

    def moments(self, left: np.ndarray) -> np.ndarray:
        """Seconds (s, g) until so many requests are live; each of `left` (g,) is below the number of live requests."""
        ends = np.where(self.tokens > 0, self.start[:, None] + self.ends, 0.0).reshape(len(self.tokens), -1)
        return np.sort(ends, axis=-1)[:, -1 - left]

    def until(self, left: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The moment at which `left` requests are live: seconds (s,), and their tokens and context (s, left).

        Requests that end at the same time as another may have ended by then; they have 0 tokens left.
        `left` is below the number of live requests.
        """
        scenarios = len(self.tokens)
        ends = np.where(self.tokens > 0, self.start[:, None] + self.ends, 0.0).reshape(scenarios, -1)
        order = np.argsort(ends, axis=-1, kind="stable")
        moment = np.take_along_axis(ends, order[:, -left - 1, None], axis=-1)
        steps = self._steps(np.maximum(moment - self.start, 0.0))[..., None]
        tokens, context = (
            np.take_along_axis(x.reshape(scenarios, -1), order[:, -left:], axis=-1)
            for x in (np.maximum(self.tokens - steps, 0.0), self.context + steps)
        )
        return moment[:, 0], tokens, context

    def _steps(self, moment: np.ndarray) -> np.ndarray:
        """Decode steps (s, r) that each replica has made after `moment` (s, r) seconds of decoding."""
        width = self.tokens.shape[-1]
        ended = (self.ends <= moment[..., None]).sum(axis=-1, keepdims=True)
        following = np.minimum(ended, width - 1)
        t1, n1 = (np.take_along_axis(x, following, axis=-1) for x in (self.ends, self.tokens))
        t0, n0 = (np.where(ended > 0, np.take_along_axis(x, ended - 1, axis=-1), 0.0) for x in (self.ends, self.tokens))
        share = (moment[..., None] - t0) / np.where(t1 > t0, t1 - t0, 1.0)
        return (n0 + np.minimum(share, 1.0) * (n1 - n0))[..., 0]


def drain(decode: DecodeModel, tp: int, tokens: np.ndarray, context: np.ndarray, start: np.ndarray) -> Drain:
    """Run replicas of `tp` ranks until each request has generated its `tokens`.

    tokens, context: (s, r, w).  start: (r,).  Between two ends the batch is constant and the context grows by
    one token a request and step, so the steps between them cost their number times the step at mid-way (exact
    where the latency is linear in the context).
    """
    order = np.argsort(tokens, axis=-1)
    tokens, context = (np.take_along_axis(x, order, axis=-1) for x in (tokens, context))
    batch = np.arange(tokens.shape[-1], 0, -1)
    before = np.concatenate([np.zeros_like(tokens[..., :1]), tokens[..., :-1]], axis=-1)
    alive = np.cumsum(context[..., ::-1], axis=-1)[..., ::-1]
    step = decode.seconds(tp, batch, alive + batch * (before + tokens) / 2)
    return Drain(tokens, context, np.cumsum((tokens - before) * step, axis=-1), start)


def deal_evenly(tokens: np.ndarray, context: np.ndarray, replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """Requests (s, n) dealt in turn to replicas, those with the longest context first: both as (s, r, w).

    The order may use nothing but what is known at that moment, and the remaining tokens are not.
    """
    if replicas > 1:
        order = np.argsort(-context, axis=-1)
        tokens, context = (np.take_along_axis(x, order, axis=-1) for x in (tokens, context))
    padding = ((0, 0), (0, -tokens.shape[-1] % replicas))
    shape = (len(tokens), -1, replicas)
    return tuple(np.pad(x, padding).reshape(shape).swapaxes(1, 2) for x in (tokens, context))
