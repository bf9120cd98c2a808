"""The policies that a simulation compares, and PAT with one part of it changed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pat.policy import Policy, Static, Threshold
from pat.predictive import Predictive
from pat.predictor import Predictor
from pat.predictor.lengths import LengthModel
from pat.simulate.machine import Machine

History = Sequence[tuple[np.ndarray, np.ndarray]]  # of earlier iterations: tokens, and False where the cap cut
Arm = Callable[[History], Policy]  # a policy that has observed them


class ScaledLengths(LengthModel):
    """Believes that responses are `factor` times as long as they were; none exceeds `cap` tokens."""

    def __init__(self, factor: float, cap: int):
        super().__init__()
        self.factor, self.cap = factor, cap

    def observe(self, lengths: Sequence[int], finished: Sequence[bool]) -> None:
        believed = np.minimum(np.rint(self.factor * np.asarray(lengths)), self.cap).astype(int)
        super().observe(believed, np.asarray(finished) & (believed < self.cap))


@dataclass(frozen=True)
class ScaledDecode:
    """A latency model that is wrong about one tp: `factor` times the seconds of `model`."""

    model: object
    tp: int
    factor: float

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        return self.model.tp_sizes

    def seconds(self, tp: int, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        return self.model.seconds(tp, batch, context) * (self.factor if tp == self.tp else 1.0)


def pat(machine: Machine, limits: Mapping, lengths: Callable[[], LengthModel] = LengthModel, **changed) -> Arm:
    """PAT's policy on `machine`.  limits: margin, max_switch_share, max_switches, kv.

    lengths: makes what it learns from.  changed: limits that differ, and `predictor`, if it believes in another one.
    """
    predictor: Predictor = changed.pop("predictor", machine.predictor)

    def make(history: History) -> Policy:
        policy = Predictive(predictor, lengths(), machine.tp_sizes, **(dict(limits) | changed))
        for tokens, finished in history:
            policy.observe(tokens, finished)
        return policy

    return make


def statics(machine: Machine) -> dict[str, Arm]:
    return {f"tp{tp}": lambda history, tp=tp: Static(tp) for tp in sorted(machine.tp_sizes)}


def threshold(machine: Machine, unfinished: int) -> Arm:
    """The widest size once at most `unfinished` requests of a node are left."""
    return lambda history: Threshold(max(machine.tp_sizes), unfinished)


def threshold_sweep(requests: int) -> list[int]:
    """Numbers of unfinished requests to try as a threshold, for a node with `requests`: 1, 2, 3, 4, 6, 8, 12, ..."""
    counts = {n for k in range(requests.bit_length()) for n in (1 << k, 3 << k)}
    return sorted(n for n in counts if n <= max(requests - 1, 1))


def ablations(machine: Machine, limits: Mapping, cap: int) -> dict[str, Arm]:
    """PAT with one part changed, named by it."""
    arms = {
        "pat-one-switch": pat(machine, limits, max_switches=min(1, limits["max_switches"])),
        "pat-lengths-x0.5": pat(machine, limits, lambda: ScaledLengths(0.5, cap)),
        "pat-lengths-x2": pat(machine, limits, lambda: ScaledLengths(2.0, cap)),
    }
    if any(machine.predictor.switch.modes(tp, tp) for tp in machine.tp_sizes):
        arms["pat-no-rebalancing"] = pat(machine, limits, rebalance=False)
    pairs = [(a, b) for a in machine.tp_sizes for b in machine.tp_sizes if a != b]
    for kv in ("recompute", "migrate"):
        if all(kv in machine.predictor.switch.modes(*pair) for pair in pairs):
            arms[f"pat-{kv}-only"] = pat(machine, limits, kv=kv)
    for tp in sorted(machine.tp_sizes):
        for factor in (0.8, 1.2):
            wrong = replace(machine.predictor, decode=ScaledDecode(machine.predictor.decode, tp, factor))
            arms[f"pat-tp{tp}-latency-x{factor}"] = pat(machine, limits, predictor=wrong)
    return arms
