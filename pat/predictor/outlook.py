"""The plans for a generation stage: stay until so many requests are left, switch, and so on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pat.layout import deal, rebalance
from pat.predictor import Predictor
from pat.predictor.later import Later, Rest
from pat.predictor.remaining import Drain, deal_evenly, drain, slots, take

if TYPE_CHECKING:
    from pat.policy import RolloutState


@dataclass(frozen=True)
class Plan:
    """What a first switch and the best later ones make of the stage: means over the scenarios.

    tp: of the first switch; the present one is a rebalance.

    after_s: from the end of the first switch to the end of the stage, later switches included, each of them counted
    at its cost x (1 + margin).  cost_s: seconds of the first switch.  later_cost_s: of the others, in after_s.
    alone_s: after_s if no other switch follows.
    """

    tp: int
    cost_s: float
    kv: str
    after_s: float
    later_cost_s: float
    alone_s: float


class Outlook:
    """What the predictor expects of one state that has live requests.

    tokens: (s, n) remaining tokens of each live request in each scenario.  modes: the KV modes to choose
    from, by (tp_from, tp_to), for each pair of `tp_sizes`, and for a size and itself where a rebalance is
    allowed.  switches: most switches that may follow the first one.
    """

    def __init__(
        self,
        predictor: Predictor,
        modes: Mapping[tuple[int, int], Sequence[str]],
        state: "RolloutState",
        tokens: np.ndarray,
        tp_sizes: Sequence[int],
        switches: int,
        margin: float,
    ):
        self.predictor, self.modes, self.tp = predictor, modes, state.tp
        self.tp_sizes = tuple(tp_sizes)
        self.ranks = state.tp * len(state.replicas)
        self.tokens = tokens.astype(float)
        self.context = np.array([request.prompt + request.generated for request in state.live], float)
        self.in_kv = np.array([request.generated > 0 for request in state.live])
        self.owner = [replica for replica, requests in enumerate(state.replicas) for _ in requests]
        self.stay = self._run(state.tp, slots(self.owner, len(state.replicas)))
        self.rest = Rest.of(predictor.decode, self.tp_sizes, self.ranks, self.tokens, self.context)
        *_, self._after_one, self._first = Later.up_to(
            self.rest,
            lambda a, b: self._switch_s(a, b, self.rest.left, self.rest.kv_tokens)[0],
            max(switches, 0) + 1,
            margin,
        )

    @property
    def stay_s(self) -> float:
        """Expected seconds of staying for good."""
        return float(self.stay.seconds.mean())

    def wait_s(self, limit: float) -> float:
        """Expected seconds of the best plan that switches later, its switches counted at cost x (1 + margin).

        The plan is chosen by the table of the rest; if it seems to take less than `limit`, the time from its first
        switch on is worked out replica by replica, as that of the plans which begin at once.
        """
        seconds, column, moment = self._moments(self.tp, self.stay, self._first)
        if seconds >= limit:
            return seconds
        there, left = int(self._first.to[moment, column]), int(self.rest.left[moment])
        _, tokens, context = self.stay.until(left)
        replicas = self.ranks // self.tp_sizes[there]
        dealt = deal_evenly(tokens, context, replicas)
        run = drain(self.predictor.decode, self.tp_sizes[there], *dealt, start=np.zeros(replicas))
        return seconds + float(run.seconds.mean()) - float(self.rest.seconds[moment, there])

    def run(self, tp: int) -> Drain:
        """The rest of the stage at `tp` from now on, the switch left out."""
        if tp == self.tp:
            return self.stay
        replicas = self.ranks // tp
        return self._run(tp, slots(deal(self.context.tolist(), replicas), replicas))

    def plans(self) -> Iterator[Plan]:
        """A switch at once, to each other tp, or a rebalance; requests without KV cost nothing to move."""
        for tp in self.tp_sizes:
            if tp != self.tp:
                yield self._plan(tp, self.run(tp), self.in_kv)
        counts = np.bincount(self.owner, minlength=self.ranks // self.tp)
        if self.modes.get((self.tp, self.tp)) and counts.max() - counts.min() >= 2:
            owner = rebalance(self.owner, (self.in_kv * self.context).tolist(), len(counts))
            moved = self.in_kv & (np.array(owner) != self.owner)
            yield self._plan(self.tp, self._run(self.tp, slots(owner, len(counts))), moved)

    def _plan(self, tp: int, run: Drain, moved: np.ndarray) -> Plan:
        """moved: (n,) whether the KV of each request moves."""
        requests, kv_tokens = np.array([moved.sum()]), np.array([self.context[moved].sum()])
        cost, kv = self._switch_s(self.tp, tp, requests, kv_tokens)
        alone = float(run.seconds.mean())
        after, later = self._continued(tp, run, self._after_one)
        return Plan(tp, float(cost[0]), kv[0], *((after, later) if after < alone else (alone, 0.0)), alone)

    def _continued(self, tp: int, run: Drain, later: Later) -> tuple[float, float]:
        """Seconds of `run` until its best moment to switch and from then on, and the cost of switches in them."""
        seconds, column, moment = self._moments(tp, run, later)
        return seconds, float(later.cost_s[moment, column]) if np.isfinite(seconds) else 0.0

    def _moments(self, tp: int, run: Drain, later: Later) -> tuple[float, int, int]:
        """Seconds by way of the best moment to switch in `run`, the column of `tp`, and which moment it is."""
        column = self.tp_sizes.index(tp)
        if not len(self.rest.left):
            return np.inf, column, -1
        seconds = run.moments(self.rest.left).mean(axis=0) + later.seconds[:, column]
        best = int(seconds.argmin())
        return float(seconds[best]), column, best

    def _switch_s(self, tp_from: int, tp_to: int, requests: np.ndarray, kv_tokens: np.ndarray):
        """Seconds of a switch, and how KV follows: the cheaper way for each of `requests`, `kv_tokens` (g,)."""
        modes = self.modes[tp_from, tp_to]
        costs = [self.predictor.switch.seconds(tp_from, tp_to, requests, kv_tokens, mode) for mode in modes]
        cheapest = np.argmin(costs, axis=0)
        return np.min(costs, axis=0), [modes[i] for i in cheapest]

    def _run(self, tp: int, slots: np.ndarray) -> Drain:
        """Requests laid out by slots (r, w), after the prefill of those that have no KV yet."""
        tokens, context = take(self.tokens, slots), take(self.context, slots)
        waiting = take(~self.in_kv, slots)
        requests, prompt = waiting.sum(axis=-1), (waiting * context).sum(axis=-1)
        # All of it: samples of a prompt that arrive together are prefilled in one step and do not find each other's KV.
        prefill = self.predictor.prefill.seconds(tp, requests, prompt, np.zeros_like(prompt))
        start = np.where(requests > 0, prefill, 0.0)
        return drain(self.predictor.decode, tp, tokens, np.broadcast_to(context, tokens.shape), start)
