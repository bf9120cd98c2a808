import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.arms import from_config
from pat.policy import Decision, Live, RolloutState, Static, Threshold
from pat.predictive import Predictive
from pat.predictor import Predictor
from pat.predictor.latency import DecodeModel, PrefillModel
from pat.predictor.lengths import LengthModel
from pat.predictor.regression import Curve
from pat.predictor.switching import MODES, SwitchCost, SwitchModel

CAP = 512
# Seconds of a decode step at batch 1 and 8 as measured with a 135M model on two cores; tp 4 goes on likewise.
STEPS = {1: (0.073, 0.138), 2: (0.055, 0.098), 4: (0.045, 0.080)}
MIGRATE, RECOMPUTE = SwitchCost(0.4, 0.01, 1e-5), SwitchCost(0.4, 0.01, 1e-3)


def machine(steps=STEPS, cost=MIGRATE, recompute=RECOMPUTE, context=1e-6):
    costs = {"migrate": cost, "recompute": recompute}
    pairs = itertools.permutations(steps, 2)
    return Predictor(
        DecodeModel(
            {tp: Curve((1, 8), seconds) for tp, seconds in steps.items()},
            {tp: Curve((0, 1), (0, context / tp)) for tp in steps},
        ),
        PrefillModel({tp: Curve((0, 1), (0.05, 0.051)) for tp in steps}, dict.fromkeys(steps, (0, 0, 0, 0, 0))),
        SwitchModel({(a, b, mode): costs[mode] for a, b in pairs for mode in MODES}),
    )


class Known:
    """A length model for which every response has the same, known length."""

    def __init__(self, length):
        self.length = length

    def remaining(self, generated, cap, draws):
        return np.broadcast_to(np.maximum(self.length - generated, 1), draws.shape)

    def observe(self, lengths, finished):
        pass


class Listed:
    """A length model that knows what each live request, in order, still has to generate."""

    def __init__(self, remaining):
        self.known = np.array(remaining)

    def remaining(self, generated, cap, draws):
        return np.broadcast_to(self.known, draws.shape)


def policy(predictor=None, lengths=None, tp_sizes=(1, 2), margin=0.1, share=0.2, switches=4, kv="auto"):
    return Predictive(predictor or machine(), lengths or LengthModel(), tp_sizes, margin, share, switches, kv)


def state(generated, tp=1, ranks=2, prompt=100, switches=0, switch_s=0.0, elapsed_s=60.0):
    """Live requests dealt in turn to the replicas."""
    replicas = ranks // tp
    live = [tuple(Live(prompt, n) for n in generated[r::replicas]) for r in range(replicas)]
    return RolloutState(tp, tuple(live), CAP, switches, switch_s, elapsed_s)


def test_a_full_batch_stays_narrow():
    # 32 requests: 16 a replica take 0.21 s a step at tp 1, all of them in one at tp 2 take 0.25 s.
    decision = policy().decide(state([1] * 32))
    assert decision.tp == 1
    assert (decision.saving_s, decision.cost_s, decision.kv) == (None, None, None)
    assert decision.remaining_s[1] > 0


@pytest.mark.parametrize("live", [1, 2, 4])
def test_the_tail_goes_wide(live):
    decision = policy().decide(state([200] * live))
    assert decision.tp == 2
    assert decision.kv == "migrate"
    assert decision.saving_s > 1.1 * decision.cost_s > 0
    assert decision.saving_s == pytest.approx(decision.remaining_s[1] - decision.remaining_s[2])
    assert decision.cost_s == pytest.approx(0.4 + 0.01 * live + 1e-5 * 300 * live)


def test_expected_times_of_known_lengths():
    # Two replicas of one request with 100 tokens left each; wide, both in one batch of two.
    flat = machine({1: (0.073, 0.073), 2: (0.055, 0.055)}, context=0)
    decision = policy(flat, Known(300)).decide(state([200, 200]))
    assert decision.remaining_s == pytest.approx({1: 7.3, 2: 5.5})
    assert decision.saving_s == pytest.approx(1.8)


def test_a_switch_that_costs_more_than_it_saves_is_not_made():
    dear = SwitchCost(30.0, 0, 0)
    decision = policy(machine(cost=dear, recompute=dear), share=1.0).decide(state([200, 200]))
    assert decision.tp == 1
    assert decision.remaining_s[2] < decision.remaining_s[1]


def test_the_margin_must_be_saved_too():
    flat = machine({1: (0.073, 0.073), 2: (0.055, 0.055)}, cost=SwitchCost(1.5, 0, 0), context=0)
    for margin, tp in ((0.1, 2), (0.3, 1)):  # the saving is 1.8 s
        assert policy(flat, Known(300), margin=margin, kv="migrate").decide(state([200, 200])).tp == tp


def test_uniform_lengths_on_a_machine_without_gain_stay():
    even = machine({1: (0.073, 0.138), 2: (0.073, 0.203)})
    for generated in (0, 50, 400):
        assert policy(even, Known(450)).decide(state([generated] * 16)).tp == 1


def test_equal_layouts_stay_where_they_are():
    same = machine({1: (0.07, 0.07), 2: (0.07, 0.07)}, cost=SwitchCost(0, 0, 0), context=0)
    assert policy(same).decide(state([100] * 4, tp=1)).tp == 1
    assert policy(same).decide(state([100] * 4, tp=2)).tp == 2


def test_it_waits_when_a_later_switch_is_better():
    # Wide is twice as slow for 16 requests and twice as fast for one: best once the 15 short ones have ended.
    predictor = machine({1: (0.08, 0.08), 2: (0.04, 0.12)}, cost=SwitchCost(0.1, 0, 0), context=0)
    live = state([100] * 16)
    lengths = [20] * 15 + [400]
    now = policy(predictor, Listed(lengths)).decide(live)
    assert now.remaining_s[2] < now.remaining_s[1] - 10  # switching at once would pay
    assert now.tp == 1
    assert policy(predictor, Listed([380])).decide(state([120])).tp == 2


def test_it_starts_wide_when_that_is_better_and_moves_no_kv():
    predictor = machine({1: (0.08, 0.30), 2: (0.04, 0.10)}, cost=SwitchCost(0.1, 1.0, 1.0))
    decision = policy(predictor).decide(state([0] * 8, elapsed_s=0.0))
    assert decision.tp == 2
    assert decision.cost_s == pytest.approx(0.1)


def test_it_goes_back_to_narrow_when_that_is_better():
    predictor = machine({1: (0.08, 0.10), 2: (0.07, 0.60)})
    assert policy(predictor).decide(state([50] * 16, tp=2)).tp == 1


def test_four_ranks_choose_among_three_sizes():
    wide = policy(tp_sizes=(1, 2, 4)).decide(state([200], ranks=4))
    assert wide.tp == 4
    assert set(wide.remaining_s) == {1, 2, 4}
    costly = machine(STEPS | {4: (0.30, 0.40)})
    assert policy(costly, tp_sizes=(1, 2, 4)).decide(state([200], ranks=4)).tp == 2


def test_switches_and_their_time_are_limited():
    tail = [200, 200]
    assert policy(switches=3).decide(state(tail, switches=2)).tp == 2
    assert policy(switches=3).decide(state(tail, switches=3)).tp == 1
    assert policy(switches=0).decide(state(tail)).tp == 1
    assert policy(share=0.1).decide(state(tail, switch_s=1.0)).tp == 2
    assert policy(share=0.1).decide(state(tail, switch_s=20.0)).tp == 1


def test_kv_takes_the_cheaper_way_unless_forced():
    cheap = machine(recompute=SwitchCost(0.1, 0, 0))
    assert policy(cheap).decide(state([200])).kv == "recompute"
    assert policy(cheap, kv="migrate").decide(state([200])).kv == "migrate"
    forced = policy(kv="recompute").decide(state([200]))
    assert forced.kv == "recompute"
    assert forced.cost_s == pytest.approx(0.4 + 0.01 + 1e-3 * 300)


def test_history_changes_the_decision():
    short, long = policy(), policy()
    short.observe([205] * 200, [True] * 200)
    long.observe([500] * 200, [True] * 200)
    assert short.decide(state([200, 200])).tp == 1  # a few tokens are left
    assert long.decide(state([200, 200])).tp == 2


STATES = st.builds(
    state,
    generated=st.lists(st.integers(0, CAP - 1), max_size=24),
    tp=st.sampled_from([1, 2, 4]),
    ranks=st.just(4),
    switches=st.integers(0, 5),
    switch_s=st.floats(0, 20),
    elapsed_s=st.floats(0, 200),
)


@given(STATES)
@settings(max_examples=60, deadline=None)
def test_every_switch_keeps_the_rules(live):
    decide = policy(tp_sizes=(1, 2, 4), margin=0.2, share=0.15, switches=3).decide
    decision = decide(live)
    assert decision == decide(live)
    if not live.live:
        assert decision.tp == 1
    elif decision.tp != live.tp:
        assert live.switches < 3
        assert decision.saving_s > 1.2 * decision.cost_s
        after = decision.remaining_s[decision.tp]
        total = live.elapsed_s + decision.cost_s + after
        assert live.switch_s + decision.cost_s <= 0.15 * total * (1 + 1e-9)
        assert decision.saving_s <= decision.remaining_s[live.tp]
        assert decision.kv in MODES


def test_a_thousand_requests_are_decided_on():
    decision = policy().decide(state([i % 500 for i in range(1024)]))
    assert decision.tp == 1
    assert decision.remaining_s[2] > decision.remaining_s[1]


def test_static_and_threshold():
    assert Static(2).decide(state([])).tp == 2
    assert Static(1).decide(state([5])).kv is None
    threshold = Threshold(tp_wide=2, unfinished=3)
    assert threshold.decide(state([])).tp == 1
    assert threshold.decide(state([0, 0])).tp == 1  # others may still arrive
    assert threshold.decide(state([5] * 4)).tp == 1
    assert threshold.decide(state([5] * 3)).tp == 2
    assert threshold.decide(state([5] * 4, tp=2)).tp == 2


CONFIG = {"margin": 0.1, "max_switch_share": 0.1, "max_switches": 4, "kv": "auto"}


def test_arms_from_a_config(tmp_path):
    machine().save(tmp_path / "model.json")
    assert from_config("tp2", [1, 2], CONFIG, None) == Static(2)
    assert from_config("tp2", [1, 2], CONFIG | {"kv": "recompute"}, None) == Static(2, "recompute")
    assert from_config("threshold12", [1, 2, 4], CONFIG, None) == Threshold(4, 12)
    pat = from_config("pat", [1, 2], CONFIG, tmp_path / "model.json")
    assert pat.decide(state([200, 200])).tp == 2
    assert pat.decide(state([], tp=2)).tp == 1


@pytest.mark.parametrize("arm", ["tp3", "tp", "PAT", "", "tp1 ", "threshold", "threshold0", "threshold-1"])
def test_an_unknown_arm_is_named(arm):
    with pytest.raises(ValueError, match=f"unknown arm '{arm}': allowed are tp1, tp2, thresholdN"):
        from_config(arm, [1, 2], CONFIG, None)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match="arm 'pat' needs a predictor"):
        from_config("pat", [1, 2], CONFIG, None)
    with pytest.raises(ValueError, match=r"policy\.kv is 'copy': allowed are auto, migrate, recompute"):
        from_config("pat", [1, 2], CONFIG | {"kv": "copy"}, None)
    machine({1: STEPS[1], 2: STEPS[2]}).save(tmp_path / "model.json")
    with pytest.raises(ValueError, match=r"lacks: latency of tp 4, switch 1->4 \(auto\)"):
        from_config("pat", [1, 2, 4], CONFIG, tmp_path / "model.json")


def test_deciding_needs_no_engine():
    heavy = {"torch", "sglang", "verl", "mlflow", "matplotlib"}
    code = f"import sys, pat.policy; print({heavy} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"


def test_steps_that_are_far_off_stop_all_switches():
    live = state([5] * 2 + [0] * 0, tp=1, ranks=2)
    decide = policy(lengths=Known(400))
    assert decide.decide(live).tp == 2
    batch, context = np.full(64, 1), np.full(64, 40)
    decide.observe_steps(1, batch, context, 5 * decide.drift.decode.seconds(1, batch, context))
    assert decide.decide(live) == Decision(1)


def test_predictions_follow_the_steps_that_are_seen():
    live, decide = state([5] * 2, tp=1, ranks=2), policy(lengths=Known(400))
    before = decide.decide(live)
    batch, context = np.full(64, 1), np.full(64, 40)
    decide.observe_steps(1, batch, context, 1.5 * decide.drift.decode.seconds(1, batch, context))
    after = decide.decide(live)
    for tp in (1, 2):
        assert after.remaining_s[tp] == pytest.approx(1.5 * before.remaining_s[tp], rel=0.05)  # all but prefill
