"""A machine of the size of a test, and policies for it."""

import itertools

import numpy as np
from hypothesis import strategies as st

from pat.policy import Decision
from pat.predictor import Predictor
from pat.predictor.latency import DecodeModel, PrefillModel
from pat.predictor.regression import Curve
from pat.predictor.switching import MODES, SwitchCost, SwitchModel
from pat.simulate import Machine, arms

CAP = 512
# Seconds of a decode step at batch 1 and 8 as measured with a 135M model on two cores; tp 4 goes on likewise.
STEPS = {1: (0.073, 0.138), 2: (0.055, 0.098), 4: (0.045, 0.080)}
MIGRATE, RECOMPUTE = SwitchCost(0.4, 0.01, 1e-5), SwitchCost(0.4, 0.01, 1e-3)
PREFILL = Curve((0, 100), (0.05, 0.15))
CONTEXT = 1e-6  # seconds a token of KV, at tp 1


def predictor(steps=STEPS, context=CONTEXT, cost=MIGRATE):
    pairs = [*itertools.permutations(steps, 2), *((tp, tp) for tp in steps)]
    return Predictor(
        DecodeModel(
            {tp: Curve((1, 8), seconds) for tp, seconds in steps.items()},
            {tp: Curve((0, 1), (0, context / tp)) for tp in steps},
        ),
        PrefillModel(dict.fromkeys(steps, PREFILL), dict.fromkeys(steps, (0, 0, 0, 0, 0))),
        SwitchModel({(a, b, m): c for a, b in pairs for m, c in zip(MODES, (cost, RECOMPUTE), strict=True)}),
    )


def machine(ranks=4, kv_tokens=10_000, **changed):
    model = predictor(**changed)
    return Machine(model, ranks, tuple(tp for tp in model.decode.tp_sizes if tp <= ranks), kv_tokens)


def pat(on, history=(), believed=None, **limits):
    limits = {"margin": 0.1, "max_switch_share": 0.1, "max_switches": 4, "kv": "auto"} | limits
    seen = [(np.array(history), np.array(history) < CAP)] if len(history) else []
    return lambda: arms.pat(on, limits, **({"predictor": believed} if believed else {}))(seen)


class Plan:
    """Switches to the k-th size at the k-th time that it is asked and something is live."""

    def __init__(self, sizes):
        self.sizes, self.states = list(sizes), []

    def decide(self, state):
        if not state.live:
            return Decision(state.tp)
        self.states.append(state)
        return Decision(self.sizes.pop(0) if self.sizes else state.tp)

    def observe(self, lengths, finished):
        pass

    def observe_steps(self, tp, batch, context, seconds):
        pass


def step_by_step(on, tp, prompts, responses):
    """Seconds of one replica with room for all, by running every step."""
    seconds = float(on.predictor.prefill.seconds(tp, len(prompts), sum(prompts), 0))
    for step in range(1, max(responses)):
        live = [p + step for p, n in zip(prompts, responses, strict=True) if n > step]
        seconds += float(on.predictor.decode.seconds(tp, len(live), sum(live)))
    return seconds


LENGTHS = st.lists(st.integers(1, CAP), min_size=1, max_size=24)
