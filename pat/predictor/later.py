"""The best that later switches can make of a generation stage, from each of a few moments on.

Array axes: s scenarios, n live requests, g moments.  A moment is "so many requests are left".  What happens between
two of them is told from the order in which requests end alone, the same at every tp: a replica is taken to have its
share of those that are live, so that one table a tp holds the time between any two moments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pat.predictor.latency import DecodeModel

SHARE = 0.8  # of the requests live at one moment are live at the next


def moments(live: int) -> np.ndarray:
    """Numbers of live requests, below `live` and descending, at which a later switch is considered."""
    left, numbers = live - 1, []
    while left > 0:
        numbers.append(left)
        left = min(left - 1, int(left * SHARE))
    return np.array(numbers, int)


@dataclass(frozen=True)
class Rest:
    """Expected course of the stage after each moment, at each of `tp_sizes` without another switch."""

    tp_sizes: tuple[int, ...]
    left: np.ndarray  # (g,) live requests, descending
    kv_tokens: np.ndarray  # (g,) tokens that they have in KV, mean of the scenarios
    seconds: np.ndarray  # (g, tp sizes) until the last of them has ended, mean of the scenarios

    @classmethod
    def of(
        cls, decode: DecodeModel, tp_sizes: Sequence[int], ranks: int, tokens: np.ndarray, context: np.ndarray
    ) -> "Rest":
        """tokens: (s, n) that each live request still generates.  context: (n,) tokens that each has in KV."""
        order = np.argsort(tokens, axis=-1)
        ends, live = np.take_along_axis(tokens, order, axis=-1), tokens.shape[-1]
        before = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=-1)
        alive = np.arange(live, 0, -1)
        held = np.cumsum(context[order][:, ::-1], axis=-1)[:, ::-1]  # tokens of those alive, as they are now
        left = moments(live)
        seconds = np.empty((len(left), len(tp_sizes)))
        for column, tp in enumerate(tp_sizes):
            # The request that ends last shares its replica with an even part of the others.
            batch = 1 + (alive - 1) * (tp / ranks)
            step = decode.seconds(tp, batch, (held / alive + (before + ends) / 2) * batch)
            spans = ((ends - before) * step).mean(axis=0)
            seconds[:, column] = np.cumsum(spans[::-1])[left - 1]
        kv_tokens = (held + alive * before).mean(axis=0)[live - left]
        return cls(tuple(tp_sizes), left, kv_tokens, seconds)


@dataclass(frozen=True)
class Later:
    """Switching at each moment, from each tp to the best other one: (g, tp sizes), infinite where that is not allowed.

    seconds: expected from then to the end of the stage, every switch counted at its cost x (1 + margin).
    cost_s: the part of it that is the cost of switches, without the margin.  to: the other one, as a column.
    """

    seconds: np.ndarray
    cost_s: np.ndarray
    to: np.ndarray

    @classmethod
    def up_to(cls, rest: Rest, cost: Callable[[int, int], np.ndarray], switches: int, margin: float) -> list["Later"]:
        """The best plans of at most 0, 1, .. `switches` switches, each at a later moment than the one before.

        cost: seconds (g,) of a switch between two sizes, at every moment.  By dynamic programming: what one switch
        more can do follows from what one fewer can, from the last moment back.
        """
        sizes = range(len(rest.tp_sizes))
        costs = np.full((len(rest.left), len(sizes), len(sizes)), np.inf)
        for a in sizes:
            for b in sizes:
                if a != b:
                    costs[:, a, b] = cost(rest.tp_sizes[a], rest.tp_sizes[b])
        spans = -np.diff(rest.seconds, axis=0, append=0.0)  # at each tp, from one moment to the next
        never = np.full_like(rest.seconds, np.inf)
        plans = [cls(never, never, np.zeros(never.shape, int))]
        for _ in range(switches):
            go, go_paid = plans[-1].seconds, plans[-1].cost_s
            stay, stay_paid = rest.seconds.copy(), np.zeros_like(never)  # from each moment on, if not switching at it
            for g in range(len(rest.left) - 2, -1, -1) if len(plans) > 1 else ():
                switch = go[g + 1] < stay[g + 1]
                stay[g] = spans[g] + np.where(switch, go[g + 1], stay[g + 1])
                stay_paid[g] = np.where(switch, go_paid[g + 1], stay_paid[g + 1])
            there = costs * (1 + margin) + stay[:, None, :]
            best = there.argmin(axis=-1)[..., None]
            seconds = np.take_along_axis(there, best, axis=-1)[..., 0]
            paid = np.take_along_axis(costs + stay_paid[:, None, :], best, axis=-1)[..., 0]
            plans.append(cls(seconds, paid, best[..., 0]))
        return plans
