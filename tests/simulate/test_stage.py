"""The simulated stage against hand computations and step-by-step runs, and what no policy may do to it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat.policy import Static
from pat.predictor.switching import SwitchCost
from pat.simulate import Requests, lengths, simulate
from pat.simulate.schedule import schedule
from tests.simulate.machines import CAP, LENGTHS, STEPS, Plan, machine, pat, step_by_step


def test_one_request_by_hand():
    # Prefill of 100 tokens gives the first token; 9 decode steps with 101..109 tokens in KV give the others.
    result = simulate(machine(1), lambda: Static(1), Requests.of([10], 100))
    assert result.seconds == pytest.approx(0.15 + 9 * 0.073 + 1e-6 * sum(range(101, 110)))
    assert result.tokens == 10


def test_a_response_of_one_token_needs_no_decode_step():
    result = simulate(machine(2), lambda: Static(2), Requests.of([1, 1], 50))
    assert result.seconds == pytest.approx(0.15)


@given(LENGTHS, st.integers(1, 200), st.sampled_from([1, 2, 4]))
def test_static_equals_running_every_step(responses, prompt, tp):
    on, requests = machine(), Requests.of(responses, prompt, CAP)
    replicas = [responses[replica :: 4 // tp] for replica in range(4 // tp)]
    expected = max(step_by_step(on, tp, [prompt] * len(own), own) for own in replicas if own)
    assert simulate(on, lambda: Static(tp), requests).seconds == pytest.approx(expected)


def test_prefill_is_cut_into_steps():
    on = replace(machine(1), prefill_tokens=100)
    assert simulate(on, lambda: Static(1), Requests.of([1, 1], 100)).seconds == pytest.approx(2 * 0.15)


def test_a_prompt_that_an_earlier_step_has_prefilled_is_in_the_cache():
    requests = Requests.of([1] * 4, 100, samples=4)
    together = simulate(machine(1), lambda: Static(1), requests)
    assert together.seconds == pytest.approx(0.05 + 400 * 0.001)  # one step: none finds another's KV
    # Steps of 100 tokens: 3 of the 4 find 99 of 100 tokens, which leaves 103 new ones in two steps.
    one_by_one = simulate(replace(machine(1), prefill_tokens=100), lambda: Static(1), requests)
    assert one_by_one.seconds == pytest.approx(2 * 0.05 + 103 * 0.001)


def test_a_switch_by_hand():
    # Asked at the start, and after 32 steps of the two replicas together: 16 each, so that 17 tokens are there.
    plan = Plan([1, 2])
    on = machine(2, context=0)
    result = simulate(on, lambda: plan, Requests.of([40, 40], 100))
    (switch,) = result.switches
    before = 0.15 + 16 * 0.073
    assert [request.generated for request in plan.states[1].live] == [17, 17]
    assert switch.at_s == pytest.approx(before)
    assert switch.cost_s == pytest.approx(0.4 + 2 * 0.01 + 2 * 117 * 1e-5)
    assert (switch.tp_from, switch.tp_to, switch.unfinished, switch.kv) == (1, 2, 2, "migrate")
    assert result.seconds == pytest.approx(before + switch.cost_s + 23 * (0.055 + 0.043 / 7))


def test_a_switch_before_the_first_token_moves_nothing():
    result = simulate(machine(2), lambda: Plan([2]), Requests.of([40, 40], 100))
    (switch,) = result.switches
    assert (switch.at_s, switch.cost_s) == (0.0, pytest.approx(0.4))
    assert result.seconds == pytest.approx(
        0.4 + simulate(machine(2), lambda: Static(2), Requests.of([40] * 2, 100)).seconds
    )


@given(LENGTHS, st.lists(st.sampled_from([1, 2, 4]), max_size=12), st.integers(1, 3))
def test_tokens_are_conserved_whatever_is_switched(responses, sizes, nodes):
    nodes = min(nodes, len(responses))
    plans = [Plan(sizes) for _ in range(nodes)]
    result = simulate(machine(), iter(plans).__next__, Requests.of(responses, 30, CAP), nodes)
    assert result.tokens == sum(responses)
    assert result.samples == len(responses)
    for number, (node, plan) in enumerate(zip(result.nodes, plans, strict=True)):
        own = sorted(responses[number::nodes], reverse=True)
        assert (node.ends > 0).all()
        for state in plan.states:
            assert len(state.replicas) == 4 // state.tp
            # Who is live has generated less than it will; nobody was lost on the way.
            left = len(own) - (node.ends <= state.elapsed_s + 1e-9).sum()
            assert len(state.live) == left
            generated = sorted((request.generated for request in state.live), reverse=True)
            assert all(g < n for g, n in zip(generated, own, strict=False))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 40), st.integers(0, 200))
def test_the_kv_capacity_is_respected(responses, prompt, more):
    capacity = prompt + max(responses) + more
    n = len(responses)
    steps = schedule([prompt] * n, responses, [False] * n, capacity, 60)
    decode = np.array([s > 0 for s in steps.steps])
    last = np.array(steps.tokens) + np.array(steps.batch) * (np.array(steps.steps) - 1)
    assert (last[decode] <= capacity).all()
    # Everybody ends once, with all its tokens, in as many spans as it takes.
    made = np.bincount(steps.request, np.array(steps.length) + (np.array(steps.prefill) >= 0), minlength=n)
    assert made.tolist() == responses
    assert np.bincount(np.array(steps.request)[steps.ends], minlength=n).tolist() == [1] * n


def test_waiting_requests_are_admitted_in_turn_when_others_end():
    # Room for one and a bit of 60 tokens: one after the other, each prefilled by itself.
    on = machine(1, kv_tokens=70, context=0)
    result = simulate(on, lambda: Static(1), Requests.of([20, 10, 5], 40, 20))
    each = 0.05 + 40 * 0.001
    assert result.nodes[0].ends == pytest.approx(np.cumsum([each + 19 * 0.073, each + 9 * 0.073, each + 4 * 0.073]))


def test_a_wider_replica_holds_as_many_times_more():
    narrow = simulate(machine(2, kv_tokens=62), lambda: Static(1), Requests.of([20] * 4, 40, 20))
    wide = simulate(machine(2, kv_tokens=62), lambda: Static(2), Requests.of([20] * 4, 40, 20))
    assert len(set(narrow.ends)) == 2
    assert len(set(wide.ends)) == 2  # two at a time in 124 tokens


def test_a_request_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="a request of 300 tokens does not fit kv_tokens = 299"):
        simulate(machine(kv_tokens=299), lambda: Static(1), Requests.of([200], 100))


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.floats(1.0, 3.0))
def test_more_latency_never_shortens(responses, tp, factor):
    requests = Requests.of(responses, 30, CAP)
    slow = {each: tuple(factor * s for s in seconds) for each, seconds in STEPS.items()}
    fast, slower = (simulate(machine(steps=s), lambda: Static(tp), requests) for s in (STEPS, slow))
    assert slower.seconds >= fast.seconds * (1 - 1e-12)
    dear = machine(cost=SwitchCost(0.4 * factor, 0.01, 1e-5))
    switched = [simulate(on, lambda: Plan([1, 2, 4]), requests).seconds for on in (machine(), dear)]
    assert switched[1] >= switched[0] * (1 - 1e-12)


def test_nodes_end_with_the_last_and_are_dealt_in_turn():
    responses = [100, 10, 50, 20]
    result = simulate(machine(), lambda: Static(2), Requests.of(responses, 30), nodes=2)
    alone = [simulate(machine(), lambda: Static(2), Requests.of(responses[node::2], 30)).seconds for node in (0, 1)]
    assert [node.seconds for node in result.nodes] == alone
    assert result.seconds == max(alone)
    with pytest.raises(ValueError, match="3 nodes"):
        simulate(machine(), lambda: Static(2), Requests.of([1, 2], 30), nodes=3)


def test_the_tail_and_the_live_curve():
    on = machine(1, context=0, steps={1: (0.1, 0.1)})
    result = simulate(on, lambda: Static(1), Requests.of([10] * 19 + [100], 5))
    end = result.ends[-1]
    assert result.tail_share == pytest.approx(90 * 0.1 / end)
    at, live = result.live_curve()
    assert (at[0], live[0], at[-1], live[-1]) == (0.0, 20, end, 0)
    assert (np.diff(at) >= 0).all() and (np.diff(live) < 0).all()


@pytest.mark.slow
def test_a_hundred_nodes_and_65536_requests():
    """Takes about a minute on one core; asserts no timing."""
    on = replace(machine(8, kv_tokens=400_000), tp_sizes=(1, 2, 4))
    rng = np.random.default_rng(0)
    history, responses = (lengths.cut(rng.lognormal(7.916, 0.887, 65_536), 16_384) for _ in range(2))
    requests = Requests.of(responses, 200, 16_384)
    make = pat(on, history[:512])
    result = simulate(on, make, requests, nodes=128)
    assert (result.samples, result.tokens) == (65_536, responses.sum())
