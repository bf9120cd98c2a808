"""``pat bench decision``: what a decision of the policy costs, against a decode step and over a whole generation.

The policy decides in the engine's main process while the ranks generate: no step waits for it. Its time still counts
where it has no core of its own, and because a late decision acts on an old state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from pat import provenance
from pat.arms import from_config
from pat.policy import DECISION_SHARE, Decision, Live, Policy, RolloutState
from pat.predictor import Predictor
from pat.simulate import Machine, Requests, lengths, simulate

LIVE = (16, 64, 1024)
REPEATS = 50
HISTORY = 2  # iterations whose lengths the policy has seen


class Timed:
    """A policy that also keeps the seconds of each of its decisions."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seconds: list[float] = []

    def decide(self, state: RolloutState) -> Decision:
        before = time.perf_counter()
        decision = self.policy.decide(state)
        self.seconds.append(time.perf_counter() - before)
        return decision

    def observe(self, lengths: Sequence[int], finished: Sequence[bool]) -> None:
        self.policy.observe(lengths, finished)

    def observe_steps(self, tp: int, batch: np.ndarray, context: np.ndarray, seconds: np.ndarray) -> None:
        self.policy.observe_steps(tp, batch, context, seconds)


class Limited(Timed):
    """Not asked more often than the engine's controller asks."""

    rests_until = 0.0  # seconds of the generation

    def decide(self, state: RolloutState) -> Decision:
        if state.elapsed_s < self.rests_until:
            return Decision(state.tp)
        decision = super().decide(state)
        if state.live:
            self.rests_until = state.elapsed_s + self.seconds[-1] / DECISION_SHARE
        return decision


def state(machine: Machine, live: int, prompt: int, generated: int, cap: int) -> RolloutState:
    """``live`` requests alike, dealt over the replicas of the smallest size."""
    replicas = machine.ranks // machine.base
    request = Live(prompt, generated)
    counts = [len(range(replica, live, replicas)) for replica in range(replicas)]
    return RolloutState(machine.base, tuple((request,) * count for count in counts), cap, 0, 0.0, 1.0)


def measure(machine: Machine, policy: Policy, live: int, prompt: int, cap: int, repeats: int = REPEATS) -> dict:
    """Seconds of a decision (median, 10 % and 90 % of ``repeats``) with ``live`` requests, and of a decode step then.

    {"live", "decision_s", "decision_p10_s", "decision_p90_s", "step_s", "of_a_step_pct"}. Each state is another one:
    the requests have a token more.
    """
    generated = cap // 8
    timed = Timed(policy)
    for more in range(-2, repeats):  # the first ones make tables that later ones use
        timed.decide(state(machine, live, prompt, generated + 2 + more, cap))
    low, median, high = np.quantile(timed.seconds[2:], (0.1, 0.5, 0.9)).tolist()
    batch = -(-live * machine.base // machine.ranks)
    step = float(machine.predictor.decode.seconds(machine.base, batch, batch * (prompt + generated)))
    return {
        "live": live,
        "decision_s": median,
        "decision_p10_s": low,
        "decision_p90_s": high,
        "step_s": step,
        "of_a_step_pct": 100 * median / step,
    }


def generation(machine: Machine, policy: Policy, requests: Requests) -> dict:
    """All decisions of one simulated generation, asked as the engine's controller asks: {"gen_s", "decisions",
    "decision_s" (their sum), "share_pct"}.
    """
    timed = Limited(policy)
    seconds = simulate(machine, lambda: timed, requests).seconds
    spent = sum(timed.seconds)
    return {
        "responses": len(requests),
        "gen_s": seconds,
        "decisions": len(timed.seconds),
        "decision_s": spent,
        "share_pct": 100 * spent / seconds,
    }


def run(cfg, predictor: Path, live: Sequence[int], out: Path) -> None:
    """Write ``decision.json`` to ``out`` and print it. cfg: what the stage simulate reads."""
    rollout, limits = cfg.rollout, cfg.policy.model_dump()
    tp_sizes, cap = tuple(cfg.tp_sizes), rollout.max_response
    machine = Machine(Predictor.load(predictor), cfg.ranks, tp_sizes, cfg.simulate.kv_tokens or rollout.kv_tokens)
    prompt = cfg.simulate.prompt or max(rollout.max_prompt // 2, 1)
    draw = lengths.from_config(cfg.simulate.lengths, rollout.lengths, cap)
    rng = np.random.default_rng(cfg.seed)

    def policy(responses: int) -> Policy:
        fresh = from_config("pat", tp_sizes, limits, predictor)
        for _ in range(HISTORY):
            seen = draw(rng, responses)
            fresh.observe(seen, seen < cap)
        return fresh

    decisions = [measure(machine, policy(count), count, prompt, cap) for count in live]
    whole = [generation(machine, policy(count), Requests.of(draw(rng, count), prompt, cap)) for count in live]
    document = {"tp_sizes": tp_sizes, "decisions": decisions, "generations": whole} | provenance.facts()
    out.mkdir(parents=True, exist_ok=True)
    (out / "decision.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    Console(width=120).print(_table(decisions, whole))


def _table(decisions: list[dict], whole: list[dict]) -> Table:
    table = Table(title="A decision of the policy")
    for column in (
        "live",
        "decision, ms",
        "10 to 90 %",
        "decode step, ms",
        "of a step",
        "in a generation",
        "share of it",
    ):
        table.add_column(column, justify="right")
    for one, all_ in zip(decisions, whole, strict=True):
        table.add_row(
            str(one["live"]),
            f"{1e3 * one['decision_s']:.2f}",
            f"{1e3 * one['decision_p10_s']:.2f} to {1e3 * one['decision_p90_s']:.2f}",
            f"{1e3 * one['step_s']:.2f}",
            f"{one['of_a_step_pct']:.1f} %",
            f"{all_['decisions']} decisions",
            f"{all_['share_pct']:.2f} %",
        )
    return table
