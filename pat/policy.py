"""Which tensor-parallel size an unfinished generation stage should run at: the decision, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from pat.predictor import Predictor
from pat.predictor.drift import DriftGuard
from pat.predictor.lengths import LengthModel
from pat.predictor.outlook import Outlook, Plan
from pat.predictor.remaining import stratified_draws
from pat.predictor.switching import MODES

Mode = Literal["migrate", "recompute"]

# Scenarios of remaining lengths that a decision looks at; many requests, which even out, need fewer.
SCENARIOS = 32
MIN_SCENARIOS = 8
MAX_CELLS = 16384  # scenarios x live requests
# Most of a generation's time that decisions may take: who asks a policy waits for it before asking again.
DECISION_SHARE = 0.005
# A switch must shorten the remaining time by this share at least: predictions are no better than that.
LEAST_GAIN = 0.01
# A rebalance must by this, against waiting: it changes which request meets which scenario, and that is mostly noise.
REBALANCE_GAIN = 0.05


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


class Predictive:
    """Switches to the layout, at the moment, with the least expected remaining time.

    The remaining lengths of the live requests are drawn from `lengths` in a number of scenarios (seeded:
    equal states give equal decisions).  In each of them `predictor` gives the time of staying, and of every
    plan "switch to that tp, now or when so many requests are left, and later on to another".  It switches when
    the best plan is to switch now, and
      - the plan's saving > its cost * (1 + margin), and > LEAST_GAIN of the remaining time,
      - fewer than max_switches were made in this stage, and
      - the stage's switches take at most max_switch_share of its expected time.
    Step times are predicted as `drift` corrects them by those that were seen; while these are far off or
    scattered, it stays where it is.
    A decision takes time in proportion to (tp sizes) x (scenarios x live requests); fewer scenarios for many
    requests keep the second factor at MAX_CELLS.

    kv: "auto" takes the cheaper way by the switch model.  rebalance: the unfinished requests may be spread anew at
    the same tp, if the predictor knows what that costs.  ValueError when the predictor lacks a tp or a pair.
    """

    def __init__(
        self,
        predictor: Predictor,
        lengths: LengthModel,
        tp_sizes: Sequence[int],
        margin: float,
        max_switch_share: float,
        max_switches: int,
        kv: Literal["auto", "migrate", "recompute"] = "auto",
        rebalance: bool = True,
    ):
        self.drift = DriftGuard(predictor.decode)
        self.predictor = replace(predictor, decode=self.drift)
        self.lengths = lengths
        self.tp_sizes = tuple(sorted(tp_sizes))
        self.margin = margin
        self.max_switch_share = max_switch_share
        self.max_switches = max_switches
        self.modes: dict[tuple[int, int], tuple[Mode, ...]] = {
            (a, b): tuple(m for m in predictor.switch.modes(a, b) if kv in ("auto", m))
            for a in self.tp_sizes
            for b in self.tp_sizes
            if a != b or rebalance
        }
        profiled = set(predictor.decode.tp_sizes) & set(predictor.prefill.tp_sizes)
        lacking = [f"latency of tp {tp}" for tp in self.tp_sizes if tp not in profiled]
        lacking += [f"switch {a}->{b} ({kv})" for (a, b), modes in self.modes.items() if a != b and not modes]
        if lacking:
            raise ValueError(f"the predictor lacks: {', '.join(lacking)}; profile tp sizes {list(self.tp_sizes)}")

    def observe(self, lengths: Sequence[int], finished: Sequence[bool]) -> None:
        self.lengths.observe(lengths, finished)

    def observe_steps(self, tp: int, batch: np.ndarray, context: np.ndarray, seconds: np.ndarray) -> None:
        self.drift.observe(tp, batch, context, seconds)

    def decide(self, state: RolloutState) -> Decision:
        if not state.live:
            return Decision(self.tp_sizes[0])
        if not self.drift.trusted:
            return Decision(state.tp)
        switches = min(self.max_switches - state.switches, len(self.tp_sizes)) - 1
        remaining = self._remaining(state)
        outlook = Outlook(self.predictor, self.modes, state, remaining, self.tp_sizes, switches, self.margin)
        stay = outlook.stay_s
        plans = [plan for plan in outlook.plans() if switches >= 0 or plan.tp == state.tp]
        seconds = {plan.tp: plan.alone_s for plan in plans} | {state.tp: stay}
        best = min((plan for plan in plans if self._affordable(plan, state)), key=self._value, default=None)
        least = self._value(best) if best else np.inf
        # A rebalance that is put off can be made at any later moment: it must gain by itself, not by what follows it.
        patience = REBALANCE_GAIN * stay if best and best.tp == state.tp else 0.0
        if least > stay * (1 - LEAST_GAIN) or outlook.wait_s(least + patience) < least + patience:
            return Decision(state.tp, remaining_s=seconds)
        return Decision(best.tp, stay - best.after_s, best.cost_s, best.kv, seconds, best.tp == state.tp)

    def _remaining(self, state: RolloutState) -> np.ndarray:
        """Remaining tokens (scenarios, live)."""
        generated = np.array([request.generated for request in state.live])
        scenarios = int(np.clip(MAX_CELLS // len(generated), MIN_SCENARIOS, SCENARIOS))
        return self.lengths.remaining(generated, state.cap, stratified_draws(scenarios, len(generated)))

    def _value(self, plan: Plan) -> float:
        return plan.cost_s * (1 + self.margin) + plan.after_s

    def _affordable(self, plan: Plan, state: RolloutState) -> bool:
        cost = plan.cost_s + plan.later_cost_s
        return state.switch_s + cost <= self.max_switch_share * (state.elapsed_s + plan.cost_s + plan.after_s)


def from_config(arm: str, tp_sizes: Sequence[int], policy_cfg: dict, predictor_path: Path | None) -> Policy:
    """The policy of an arm: "tpK" stays at K, which is one of tp_sizes; "pat" predicts.

    policy_cfg: margin, max_switch_share, max_switches, kv.  predictor_path: what `pat predictor` wrote; only
    "pat" needs it.  ValueError naming the arm and what is allowed.
    """
    kv = policy_cfg["kv"]
    if kv not in ("auto", *MODES):
        raise ValueError(f"policy.kv is {kv!r}: allowed are auto, {', '.join(MODES)}")
    allowed = {f"tp{tp}": tp for tp in tp_sizes}
    if arm in allowed:
        return Static(allowed[arm], kv="migrate" if kv == "auto" else kv)
    if arm != "pat":
        raise ValueError(f"unknown arm {arm!r}: allowed are {', '.join(allowed)}, pat")
    if predictor_path is None:
        raise ValueError("arm 'pat' needs a predictor: run the predictor stage first")
    limits = {key: policy_cfg[key] for key in ("margin", "max_switch_share", "max_switches")}
    return Predictive(Predictor.load(predictor_path), LengthModel(), tp_sizes, kv=kv, **limits)
