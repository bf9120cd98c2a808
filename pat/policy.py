"""What is asked and answered when a generation stage's tensor-parallel size is decided, and two simple policies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

Mode = Literal["migrate", "recompute"]

# Most of a generation's time that decisions may take: who asks a policy waits for it before asking again.
DECISION_SHARE = 0.005


@dataclass(frozen=True)
class Live:
    """One unfinished request, in tokens."""

    prompt: int
    generated: int


@dataclass(frozen=True)
class RolloutState:
    """A generation stage at a step boundary.

    replicas: the live requests of each replica of the current layout.  cap: most new tokens of a request.
    switches: changes of tp so far in this stage.  switch_s: seconds that these and rebalances took.
    elapsed_s: since its first arrival.
    """

    tp: int
    replicas: tuple[tuple[Live, ...], ...]
    cap: int
    switches: int
    switch_s: float
    elapsed_s: float

    @property
    def live(self) -> tuple[Live, ...]:
        return tuple(request for replica in self.replicas for request in replica)


@dataclass(frozen=True)
class Decision:
    """The tp to run at from now on; the state's own tp means stay, or, with `rebalance`, spread the requests anew.

    saving_s: expected remaining seconds of staying for good minus those from the new layout on (later switches
    and what they cost included), this switch left out.  cost_s: expected seconds of the switch, to be set
    against saving_s.  Both are None unless a prediction switches.  kv: how KV should follow, None when staying.
    remaining_s: expected remaining seconds by tp, if run there from now on (without the switch); empty when
    nothing was predicted.
    """

    tp: int
    saving_s: float | None = None
    cost_s: float | None = None
    kv: Mode | None = None
    remaining_s: dict[int, float] = field(default_factory=dict)
    rebalance: bool = False

    def changes(self, tp: int) -> bool:
        """Whether there is anything to do at `tp`."""
        return self.rebalance or self.tp != tp


class Policy(Protocol):
    def decide(self, state: RolloutState) -> Decision: ...

    def observe(self, lengths: Sequence[int], finished: Sequence[bool]) -> None:
        """Learn an iteration's responses: generated tokens, and False where the cap cut the response."""

    def observe_steps(self, tp: int, batch: np.ndarray, context: np.ndarray, seconds: np.ndarray) -> None:
        """Learn decode steps of replicas of `tp` ranks: (n,) live requests, their tokens in KV, seconds."""


@dataclass(frozen=True)
class Static:
    """One tp for the whole stage, set up before the first request."""

    tp: int
    kv: Mode = "migrate"

    def decide(self, state: RolloutState) -> Decision:
        return Decision(self.tp, kv=self.kv if state.tp != self.tp else None)

    def observe(self, lengths: Sequence[int], finished: Sequence[bool]) -> None:
        pass

    def observe_steps(self, tp: int, batch: np.ndarray, context: np.ndarray, seconds: np.ndarray) -> None:
        pass


@dataclass(frozen=True)
class Threshold:
    """`tp_wide` once at most `unfinished` requests are left and the first of them has a token."""

    tp_wide: int
    unfinished: int
    kv: Mode = "migrate"

    def decide(self, state: RolloutState) -> Decision:
        started = any(request.generated for request in state.live)
        if state.tp == self.tp_wide or not started or len(state.live) > self.unfinished:
            return Decision(state.tp)
        return Decision(self.tp_wide, kv=self.kv)

    def observe(self, lengths: Sequence[int], finished: Sequence[bool]) -> None:
        pass

    def observe_steps(self, tp: int, batch: np.ndarray, context: np.ndarray, seconds: np.ndarray) -> None:
        pass
