"""Who a request is: the same seed wherever and whenever it runs, another one for every other request."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.rl.identity import Identities, Numbering

PROMPTS = st.lists(st.sampled_from([(1, 2), (1, 3), (2,), (1, 2, 3), ()]), max_size=24)


def seeds(prompts, run_seed=0, iteration=1):
    identities = Identities(run_seed, iteration, None, samples=4)
    return [identities.next(prompt)[0] for prompt in prompts]


@settings(deadline=None)
@given(PROMPTS)
def test_no_two_requests_of_an_iteration_share_a_seed(prompts):
    drawn = seeds(prompts)
    assert len(set(drawn)) == len(prompts)
    assert all(0 <= seed < 2**31 for seed in drawn)


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=12).flatmap(lambda p: st.tuples(st.just(p), st.permutations(p))))
def test_seeds_do_not_depend_on_the_order_in_which_prompts_arrive(orders):
    ids = {"a": [1, 2, 3], "b": [1, 2], "c": [12, 3]}
    first, second = (Counter(zip(order, seeds([ids[p] for p in order]), strict=True)) for order in orders)
    assert first == second


def test_a_sequence_of_ids_is_the_prompt_whatever_its_type():
    assert seeds([[5, 6, 7]]) == seeds([(5, 6, 7)])


@pytest.mark.parametrize("other", [{"run_seed": 1}, {"iteration": 2}])
def test_another_run_or_iteration_draws_other_seeds(other):
    prompts = [[1, 2]] * 4 + [[3]] * 4
    assert not set(seeds(prompts)) & set(seeds(prompts, **other))


def test_prompts_are_told_apart_by_their_tokens_not_by_their_digits():
    assert len(set(seeds([[1, 23], [12, 3], [123]]))) == 3


def test_replayed_lengths_go_by_prompt_and_sample_and_are_cycled():
    identities = Identities(0, 1, lengths=[10, 11, 12, 13, 14], samples=2)
    order = [[1], [2], [1], [3], [3], [2], [4]]
    # prompt 1 has requests 0 and 1, prompt 2 has 2 and 3, prompt 3 has 4 and 5, prompt 4 has 6 and 7
    assert [identities.next(prompt)[1] for prompt in order] == [10, 12, 11, 14, 10, 13, 11]


def test_without_a_replay_lengths_are_natural():
    assert Identities(0, 1, None, samples=2).next([1])[1] is None


def test_a_request_is_who_it_is_on_whichever_server_it_runs():
    prompts = [[1], [1], [2], [1], [2], [2], [1], [2]]
    lengths = list(range(10, 18))
    alone = Identities(0, 1, lengths, samples=4)
    numbering, servers = Numbering(samples=4), [Identities(0, 1, lengths, samples=4, replica=r) for r in (0, 1)]
    for prompt in prompts:
        number = numbering.next(prompt)
        assert servers[number[0] % 2].next(prompt, number) == alone.next(prompt)


def test_servers_that_number_their_own_requests_share_no_seed():
    drawn = [Identities(0, 1, None, samples=2, replica=replica).next([1])[0] for replica in range(8)]
    assert len(set(drawn)) == 8


def test_a_prompt_that_a_batch_holds_twice_has_numbers_and_seeds_of_its_own():
    numbering = Numbering(samples=2)
    assert [numbering.next(prompt) for prompt in ([1], [1], [2], [1], [2], [1])] == [
        *((0, 0), (1, 1), (2, 0)),
        *((4, 2), (3, 1), (5, 3)),
    ]
