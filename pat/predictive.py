"""The policy of the arm pat: switches when the predicted saving is worth its predicted cost."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from pat.policy import Decision, Mode, RolloutState
from pat.predictor import Predictor
from pat.predictor.drift import DriftGuard
from pat.predictor.lengths import LengthModel
from pat.predictor.outlook import Outlook, Plan
from pat.predictor.remaining import stratified_draws

# Scenarios of remaining lengths that a decision looks at; many requests, which even out, need fewer.
SCENARIOS = 32
MIN_SCENARIOS = 8
MAX_CELLS = 16384  # scenarios x live requests
# A switch must shorten the remaining time by this share at least: predictions are no better than that.
LEAST_GAIN = 0.01
# A rebalance must by this, against waiting: it changes which request meets which scenario, and that is mostly noise.
REBALANCE_GAIN = 0.05


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
