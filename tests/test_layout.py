"""Layouts: who is in which replica, who holds which heads, and how requests are dealt."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.layout import Layout, deal, legal_tp, neighbours, rebalance


@st.composite
def layouts(draw):
    tp, dp = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    return Layout(tp * dp, tp)


@settings(deadline=None)
@given(layouts())
def test_every_rank_is_in_one_replica_at_the_place_of_its_tp_rank(layout):
    members = [rank for replica in layout.replicas for rank in replica]
    assert sorted(members) == list(range(layout.ranks))
    for rank in range(layout.ranks):
        assert layout.replicas[layout.replica(rank)][layout.tp_rank(rank)] == rank


@settings(deadline=None)
@given(layouts())
def test_the_leaders_are_the_first_ranks_of_the_replicas(layout):
    assert layout.dp == len(layout.replicas)
    assert layout.leaders == tuple(replica[0] for replica in layout.replicas)
    assert all(len(replica) == layout.tp for replica in layout.replicas)


@settings(deadline=None)
@given(ranks=st.integers(1, 16), tp=st.integers(-2, 20))
def test_only_a_divisor_of_the_ranks_is_a_tensor_parallel_size(ranks, tp):
    if tp in (n for n in range(1, ranks + 1) if ranks % n == 0):
        assert Layout(ranks, tp).tp == tp
    else:
        with pytest.raises(ValueError, match=f"tp {tp} does not divide {ranks} ranks"):
            Layout(ranks, tp)


@settings(deadline=None)
@given(tp=st.integers(1, 4), wider=st.integers(1, 4), replicas=st.integers(1, 4))
def test_a_wider_replica_is_a_union_of_narrower_ones(tp, wider, replicas):
    ranks = tp * wider * replicas
    narrow = Layout(ranks, tp).replicas
    for replica in Layout(ranks, tp * wider).replicas:
        inside = [n for n in narrow if set(n) & set(replica)]
        assert sorted(rank for n in inside for rank in n) == sorted(replica)


@settings(deadline=None)
@given(
    tp=st.integers(1, 4),
    wider=st.integers(1, 4),
    replicas=st.integers(1, 4),
    size=st.integers(1, 6),
    heads=st.integers(1, 8),
)
def test_what_a_rank_holds_when_wide_lies_inside_what_it_holds_when_narrow(tp, wider, replicas, size, heads):
    ranks = tp * wider * replicas
    narrow, wide = Layout(ranks, tp), Layout(ranks, tp * wider)
    columns = size * wide.tp  # of a parameter that every size divides
    for rank in range(ranks):
        shards = [
            set(range(x.tp_rank(rank) * columns // x.tp, (x.tp_rank(rank) + 1) * columns // x.tp))
            for x in (wide, narrow)
        ]
        assert shards[0] <= shards[1]
        kv_heads = heads * wide.tp
        assert set(wide.kv_heads(rank, kv_heads)) <= set(narrow.kv_heads(rank, kv_heads))


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_neighbours_form_the_replicas_of_every_size(factors, dp):
    sizes = [math.prod(factors[: i + 1]) for i in range(len(factors))]
    ranks = sizes[-1] * dp
    order = neighbours(ranks, sizes)
    for tp in sizes:
        consecutive = [set(order[i : i + tp]) for i in range(0, ranks, tp)]
        assert sorted(map(sorted, consecutive)) == sorted(map(list, Layout(ranks, tp).replicas))


@settings(deadline=None)
@given(layouts())
def test_a_groups_ranks_ascend_since_torch_sorts_them(layout):
    assert all(list(replica) == sorted(replica) for replica in layout.replicas)
    for rank in range(layout.ranks):
        assert layout.rank(layout.replica(rank), layout.tp_rank(rank)) == rank


@settings(deadline=None)
@given(tp=st.integers(1, 8), each=st.integers(1, 4), dp=st.integers(1, 3))
def test_enough_kv_heads_are_divided_among_the_ranks_of_a_replica(tp, each, dp):
    layout, kv_heads = Layout(tp * dp, tp), tp * each
    for replica in layout.replicas:
        held = [head for rank in replica for head in layout.kv_heads(rank, kv_heads)]
        assert held == list(range(kv_heads))  # each once, in rank order
        assert {len(layout.kv_heads(rank, kv_heads)) for rank in replica} == {each}


@settings(deadline=None)
@given(kv_heads=st.integers(1, 4), copies=st.integers(2, 4), dp=st.integers(1, 3))
def test_too_few_kv_heads_are_held_by_neighbours(kv_heads, copies, dp):
    layout = Layout(kv_heads * copies * dp, kv_heads * copies)
    for replica in layout.replicas:
        held = [list(layout.kv_heads(rank, kv_heads)) for rank in replica]
        assert held == [[head] for head in range(kv_heads) for _ in range(copies)]


def attends_locally(layout: Layout, heads: int, kv_heads: int) -> bool:
    """Whether each rank's block of query heads finds every KV head that it reads on its own rank."""
    if heads % layout.tp:
        return False
    block = heads // layout.tp
    return all(
        query * kv_heads // heads in layout.kv_heads(layout.rank(0, place), kv_heads)
        for place in range(layout.tp)
        for query in range(place * block, (place + 1) * block)
    )


@settings(deadline=None)
@given(kv_heads=st.integers(1, 8), group=st.integers(1, 6), ranks=st.integers(1, 12))
def test_a_size_is_legal_exactly_if_no_query_head_needs_another_ranks_kv(kv_heads, group, ranks):
    heads = kv_heads * group
    possible = [tp for tp in range(1, ranks + 1) if ranks % tp == 0]
    local = [tp for tp in possible if attends_locally(Layout(ranks, tp), heads, kv_heads)]
    assert list(legal_tp(heads, kv_heads, ranks)) == local


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "sizes"),
    [
        (32, 8, 8, (1, 2, 4, 8)),  # Llama-3.1-8B
        (32, 2, 8, (1, 2, 4, 8)),  # heads replicated from 4 on
        (9, 3, 2, (1,)),  # SmolLM2-135M
        (12, 4, 2, (1, 2)),  # the same, padded
        (12, 4, 8, (1, 2, 4)),
        (6, 3, 4, (1,)),
        (4, 4, 6, (1, 2)),
    ],
)
def test_legal_sizes_of_known_models(heads, kv_heads, ranks, sizes):
    assert legal_tp(heads, kv_heads, ranks) == sizes


WEIGHTS = st.lists(st.integers(0, 50), max_size=40)


@settings(deadline=None)
@given(weights=WEIGHTS, replicas=st.integers(1, 8))
def test_every_request_is_dealt_once_and_counts_are_even(weights, replicas):
    owners = deal(weights, replicas)
    assert len(owners) == len(weights)
    assert set(owners) <= set(range(replicas))
    counts = [Counter(owners)[replica] for replica in range(replicas)]
    assert sum(counts) == len(weights)
    assert max(counts) - min(counts) <= 1


@settings(deadline=None)
@given(weights=WEIGHTS, replicas=st.integers(1, 8))
def test_each_round_gives_the_heavier_request_to_the_lighter_replica(weights, replicas):
    owners = deal(weights, replicas)
    heaviest_first = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    load = [0] * replicas
    for start in range(0, len(weights), replicas):
        round_ = heaviest_first[start : start + replicas]
        before = [load[owners[i]] for i in round_]
        assert len({owners[i] for i in round_}) == len(round_)
        assert before == sorted(before)
        assert before == sorted(load)[: len(round_)]  # a last, short round goes to the lightest
        for i in round_:
            load[owners[i]] += weights[i]


@settings(deadline=None)
@given(weights=WEIGHTS, replicas=st.integers(1, 8))
def test_every_rank_deals_alike(weights, replicas):
    assert deal(weights, replicas) == deal(tuple(weights), replicas)


def test_equal_requests_are_dealt_in_turn():
    assert deal([5] * 7, 3) == [0, 1, 2, 0, 1, 2, 0]


@settings(deadline=None)
@given(weights=st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_two_replicas_differ_by_no_more_than_the_heaviest_request(weights):
    owners = deal(weights, 2)
    totals = [sum(w for w, o in zip(weights, owners, strict=True) if o == replica) for replica in (0, 1)]
    assert abs(totals[0] - totals[1]) <= max(weights)


@settings(deadline=None)
@given(data=st.data(), replicas=st.integers(1, 6))
def test_a_rebalance_evens_the_counts_and_moves_no_more_than_it_must(data, replicas):
    weights = data.draw(WEIGHTS)
    owner = data.draw(st.lists(st.integers(0, replicas - 1), min_size=len(weights), max_size=len(weights)))
    after = rebalance(owner, weights, replicas)
    counts, before = ([each.count(replica) for replica in range(replicas)] for each in (after, owner))
    assert sum(counts) == len(weights)
    assert max(counts) - min(counts) <= 1
    least, larger = divmod(len(weights), replicas)  # `larger` replicas end with one request more
    surplus = sorted((count - least for count in before), reverse=True)
    needed = sum(max(s - (rank < larger), 0) for rank, s in enumerate(surplus))
    assert sum(a != b for a, b in zip(owner, after, strict=True)) == needed
    for replica in range(replicas):  # the lightest of a replica leave
        left = [weights[i] for i, o in enumerate(owner) if o == replica != after[i]]
        kept = [weights[i] for i, o in enumerate(owner) if o == replica == after[i]]
        assert not left or not kept or max(left) <= min(kept)
