"""Policies in the simulator: when they are asked, PAT, the oracle, the ablations."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.policy import Decision, Static, Threshold
from pat.predictive import Predictive
from pat.predictor.lengths import LengthModel
from pat.predictor.switching import SwitchCost
from pat.simulate import Oracle, Requests, arms, lengths, simulate
from tests.simulate.machines import CAP, LENGTHS, Plan, machine, pat


def test_the_policy_is_asked_as_the_controller_asks():
    plan = Plan([])
    simulate(machine(), lambda: plan, Requests.of([40, 40, 40, 200], 30))
    assert [request.generated for request in plan.states[0].live] == [0] * 4
    made = [sum(request.generated for request in state.live) for state in plan.states]
    assert 32 <= made[1] <= 36  # a token each from the prefill, and 32 steps of the four replicas, some unfinished
    live = [len(state.live) for state in plan.states]
    assert live == sorted(live, reverse=True)
    first = plan.states[live.index(1)]
    assert 39 <= first.live[0].generated <= 40  # at once when the others have ended


@given(LENGTHS, st.integers(1, 2))
@settings(max_examples=25)
def test_the_oracle_is_never_behind(responses, nodes):
    on, requests = machine(), Requests.of(responses, 30, CAP)
    nodes = min(nodes, len(responses))
    makers = [*(lambda tp=tp: Static(tp) for tp in (1, 2, 4)), lambda: Threshold(4, 3), pat(on)]
    results = [simulate(on, make, requests, nodes) for make in makers]
    oracle = Oracle(on, handed_in=results).simulate(requests, nodes)
    assert oracle.seconds <= min(result.seconds for result in results)
    assert (oracle.tokens, oracle.samples) == (sum(responses), len(responses))


def test_the_oracle_finds_the_single_switch_that_trying_all_finds():
    on = machine(2, steps={1: (0.08, 0.08), 2: (0.04, 0.24)}, context=0, cost=SwitchCost(0.1, 0, 0))
    responses = [20] * 10 + [100, 150, 300, 400]
    best = min(simulate(on, lambda n=n: Threshold(2, n), Requests.of(responses, 30)).seconds for n in range(1, 14))
    assert Oracle(on).simulate(Requests.of(responses, 30)).seconds <= best * (1 + 1e-9)


class Seer(Predictive):
    """PAT that knows every response's length, by its prompt's."""

    def __init__(self, on, requests, **limits):
        super().__init__(on.predictor, LengthModel(), on.tp_sizes, **limits)
        self.lengths_by_prompt = dict(zip(requests.prompt.tolist(), requests.response.tolist(), strict=True))

    def _remaining(self, state):
        return np.array([[self.lengths_by_prompt[live.prompt] - live.generated for live in state.live]])


@given(LENGTHS)
@settings(max_examples=40)
def test_pat_with_true_lengths_is_at_most_the_cost_behind_the_best_static(responses):
    # Two ranks: wide there is one replica, so that it makes no difference how the requests are dealt.
    on, requests = machine(2), Requests.of(responses, np.arange(len(responses)) + 30, CAP)
    policy = Seer(on, requests, margin=0.1, max_switch_share=1.0, max_switches=4)
    best = min(simulate(on, lambda tp=tp: Static(tp), requests).seconds for tp in on.tp_sizes)
    result = simulate(on, lambda: policy, requests)
    # It need not switch where that saves less than 1.1 x the cost, 0.4 s. Its outlook counts a step too much for each
    # request, because it does not know that prefill gives the first token.
    assert result.seconds <= 1.01 * best + 1.1 * 0.4 + 0.14 + sum(switch.cost_s for switch in result.switches)


def test_pat_is_typically_as_fast_as_the_best_static_and_its_switches():
    on = machine()
    for count in (8, 16, 48):
        behind = []
        for seed in range(15):
            rng = np.random.default_rng(seed)
            history, responses = (lengths.cut(CAP / 24576 * rng.lognormal(7.916, 0.887, n), CAP) for n in (200, count))
            requests = Requests.of(responses, 30, CAP)
            best = min(simulate(on, lambda tp=tp: Static(tp), requests).seconds for tp in on.tp_sizes)
            result = simulate(on, pat(on, history), requests)
            behind.append((result.seconds - sum(switch.cost_s for switch in result.switches)) / best - 1)
        assert np.median(behind) <= 0.01


def test_ablations_are_wrong_only_where_they_say():
    on = machine()
    limits = {"margin": 0.1, "max_switch_share": 0.1, "max_switches": 4, "kv": "auto"}
    made = {name: make([]) for name, make in arms.ablations(on, limits, CAP).items()}
    assert made["pat-one-switch"].max_switches == 1
    assert set(made["pat-recompute-only"].modes.values()) == {("recompute",)}
    assert not [pair for pair in made["pat-no-rebalancing"].modes if pair[0] == pair[1]]
    wrong = made["pat-tp2-latency-x1.2"].predictor.decode
    true = on.predictor.decode
    assert wrong.seconds(2, 3, 100) == pytest.approx(1.2 * true.seconds(2, 3, 100))
    assert wrong.seconds(1, 3, 100) == true.seconds(1, 3, 100)
    doubled = made["pat-lengths-x2"].lengths
    doubled.observe([100] * 50 + [300] * 50, [True] * 100)
    assert doubled.survival(CAP)[199] > 0.9
    assert doubled.survival(CAP)[201] == pytest.approx(0.5, abs=0.05)


class Spread(Plan):
    """A rebalance as soon as at most `left` requests are live."""

    def __init__(self, left):
        super().__init__([])
        self.left = left

    def decide(self, state):
        if not state.live or len(state.live) > self.left:
            return Decision(state.tp)
        self.left = 0
        return Decision(state.tp, rebalance=True)


def test_a_rebalance_moves_what_it_must_and_the_rest_goes_on():
    cost = SwitchCost(0.1, 0.02, 1e-4)
    on = replace(machine(2, context=0, cost=cost), tp_sizes=(1,))
    # Dealt in turn: the first replica gets the long ones.
    requests = Requests.of([400, 10, 400, 10, 400, 10, 400, 10], 30)
    stay, spread = (simulate(on, policy, requests) for policy in (lambda: Static(1), lambda: Spread(4)))
    (switch,) = spread.switches
    assert (switch.tp_from, switch.tp_to, switch.unfinished) == (1, 1, 4)
    step = (0.073 + 3 / 7 * 0.065, 0.073 + 1 / 7 * 0.065)  # of four requests, and of two
    assert stay.seconds == pytest.approx(0.05 + 0.1 * 1.2 + 399 * step[0], rel=0.01)
    made = round((switch.at_s - 0.17) / step[0])
    assert switch.cost_s == pytest.approx(0.1 + 0.02 * 2 + 1e-4 * 2 * (30 + 1 + made), rel=0.01)
    assert spread.seconds == pytest.approx(switch.at_s + switch.cost_s + (399 - made) * step[1], rel=0.01)
    assert spread.tokens == stay.tokens


def test_pat_rebalances_where_that_pays():
    on = replace(machine(2, context=0, cost=SwitchCost(0.1, 0, 0)), tp_sizes=(1,))
    requests = Requests.of([400, 10] * 8, 30, CAP)
    policy, without = (pat(on, [400, 10] * 20, max_switch_share=0.5, rebalance=r) for r in (True, False))
    result = simulate(on, policy, requests)
    assert [(s.tp_from, s.tp_to) for s in result.switches] == [(1, 1)]
    assert result.seconds < 0.9 * simulate(on, without, requests).seconds
    assert Oracle(on).simulate(requests).seconds <= result.seconds


def test_a_wrong_latency_is_put_right_by_what_is_seen():
    on = machine(2, cost=SwitchCost(0.1, 0, 0))
    requests = Requests.of([60] * 48 + [400] * 16, 30, CAP)
    believed = replace(on.predictor, decode=arms.ScaledDecode(on.predictor.decode, 2, 0.85))
    policy = pat(on, requests.response, believed=believed)()
    batch = np.full(64, 8)  # steps of an earlier iteration, as believed
    policy.observe_steps(1, batch, 40 * batch, on.predictor.decode.seconds(1, batch, 40 * batch))
    result = simulate(on, lambda: policy, requests)
    (there, back) = result.switches
    assert (there.tp_to, back.tp_to) == (2, 1)  # believed to be faster, seen not to be
    assert back.at_s < 0.5 * result.seconds
    assert policy.drift.scales == pytest.approx({1: 1.0, 2: 1 / 0.85})
