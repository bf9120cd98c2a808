"""The plans for a generation stage: stay until so many requests are left, then switch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pat.layout import deal
from pat.predictor import Predictor
from pat.predictor.remaining import Drain, deal_evenly, drain, slots, take

if TYPE_CHECKING:
    from pat.policy import RolloutState


@dataclass(frozen=True)
class Plan:
    """Stay until `left` requests are live, then run at `tp`; seconds are means over the scenarios."""

    tp: int
    left: int
    before_s: float  # until the switch
    cost_s: float
    after_s: float  # from the end of the switch to the end of the stage
    kv: str

    @property
    def seconds(self) -> float:
        return self.before_s + self.cost_s + self.after_s


class Outlook:
    """What the predictor expects of one state that has live requests.

    tokens: (s, n) remaining tokens of each live request in each scenario.  modes: the KV modes to choose
    from, by (tp_from, tp_to).
    """

    def __init__(
        self,
        predictor: Predictor,
        modes: Mapping[tuple[int, int], Sequence[str]],
        state: "RolloutState",
        tokens: np.ndarray,
    ):
        self.predictor, self.modes, self.tp = predictor, modes, state.tp
        self.ranks = state.tp * len(state.replicas)
        self.tokens = tokens.astype(float)
        self.context = np.array([request.prompt + request.generated for request in state.live], float)
        self.in_kv = np.array([request.generated > 0 for request in state.live])
        owner = [replica for replica, requests in enumerate(state.replicas) for _ in requests]
        self.stay = self._run(state.tp, slots(owner, len(state.replicas)))

    def run(self, tp: int) -> Drain:
        """The rest of the stage at `tp` from now on, the switch left out."""
        if tp == self.tp:
            return self.stay
        replicas = self.ranks // tp
        return self._run(tp, slots(deal(self.context.tolist(), replicas), replicas))

    def plans_now(self, tp_sizes: Sequence[int]) -> Iterator[Plan]:
        """A switch at once, to each other tp; requests without KV cost nothing to move."""
        requests, kv_tokens = self.in_kv.sum(), self.context[self.in_kv].sum()
        for tp in tp_sizes:
            if tp != self.tp:
                yield self._plan(tp, len(self.context), 0.0, requests, kv_tokens, self.run(tp).seconds)

    def plans_later(self, tp_sizes: Sequence[int]) -> Iterator[Plan]:
        """A switch to each other tp at each of a few numbers of requests left."""
        for left in moments(len(self.context)):
            moment, tokens, context = self.stay.until(left)
            requests = (tokens > 0).sum(axis=-1)
            kv_tokens = np.where(tokens > 0, context, 0.0).sum(axis=-1)
            for tp in tp_sizes:
                if tp != self.tp:
                    dealt = deal_evenly(tokens, context, self.ranks // tp)
                    rest = drain(self.predictor.decode, tp, *dealt, start=np.zeros(self.ranks // tp))
                    yield self._plan(tp, left, float(moment.mean()), requests, kv_tokens, rest.seconds)

    def _plan(
        self,
        tp: int,
        left: int,
        before_s: float,
        requests: np.ndarray,
        kv_tokens: np.ndarray,
        after_s: np.ndarray,
    ) -> Plan:
        """requests, kv_tokens: (s,) or () to move or recompute.  after_s: (s,)."""
        happens = after_s > 0  # the last requests may end together, which leaves nothing to switch for
        costs = {
            mode: float(np.mean(happens * self.predictor.switch.seconds(self.tp, tp, requests, kv_tokens, mode)))
            for mode in self.modes[self.tp, tp]
        }
        kv = min(costs, key=costs.get)
        return Plan(tp, left, before_s, costs[kv], float(after_s.mean()), kv)

    def _run(self, tp: int, slots: np.ndarray) -> Drain:
        """Requests laid out by slots (r, w), after the prefill of those that have no KV yet."""
        tokens, context = take(self.tokens, slots), take(self.context, slots)
        waiting = take(~self.in_kv, slots)
        requests, prompt = waiting.sum(axis=-1), (waiting * context).sum(axis=-1)
        prefill = self.predictor.prefill.seconds(tp, requests, prompt, np.zeros_like(prompt))
        start = np.where(requests > 0, prefill, 0.0)
        return drain(self.predictor.decode, tp, tokens, np.broadcast_to(context, tokens.shape), start)


def moments(live: int) -> list[int]:
    """Numbers of live requests, below `live`, at which a later switch is considered."""
    halvings = {live >> k for k in range(1, live.bit_length())}
    return sorted((halvings | {live * 3 // 4}) - {0, live}, reverse=True)
