"""What a profile measures: every size in turn, every pair of sizes, shapes as large as a rollout's."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from pat.points import Decode, Generation, Prefill, Rebalance, Switch, points, spread


def config(tp_sizes=(1, 2, 4), ranks=4):
    profile = SimpleNamespace(batches=(1, 4, 8), contexts=(32, 192), prefill=(16, 64), steps=8)
    return SimpleNamespace(tp_sizes=tp_sizes, ranks=ranks, profile=profile, rollout=SimpleNamespace(max_response=100))


@pytest.mark.parametrize("repeat", [0, 1])
@pytest.mark.parametrize("kind", [Decode, Prefill])
def test_sizes_take_turns(kind, repeat):
    """All sizes have a shape before the next shape comes: a drift of the machine does not favour one."""
    sizes = [point.tp for point in points(config(), repeat) if isinstance(point, kind)]
    assert set(sizes) == {1, 2, 4}
    assert all(a != b for a, b in pairwise(sizes))


def test_repeats_turn_the_order_round():
    first, second = ([point.tp for point in points(config(), repeat)][:3] for repeat in (0, 1))
    assert first == second[::-1] == [1, 2, 4]


def test_every_pair_of_sizes_is_switched_both_ways_of_the_cache():
    switches = [point for point in points(config(), 1) if isinstance(point, Switch)]
    assert {(s.tp, s.other, s.kv) for s in switches} == {
        (a, b, kv) for a, b in ((1, 2), (1, 4), (2, 4)) for kv in ("migrate", "recompute")
    }
    assert len({(s.requests, s.context) for s in switches}) == 3


def test_what_has_replicas_is_rebalanced():
    found = [point for point in points(config(), 0) if isinstance(point, Rebalance)]
    assert {(point.tp, point.kv) for point in found} == {(tp, kv) for tp in (1, 2) for kv in ("migrate", "recompute")}
    assert min(point.requests for point in found) >= 2


def test_a_generation_at_each_size_in_every_repeat_with_unlike_requests():
    found = [point for repeat in (0, 1) for point in points(config(), repeat) if isinstance(point, Generation)]
    assert [point.tp for point in found] == [1, 2, 4, 4, 2, 1]
    assert {point.requests for point in found} == {8 * 4}  # as many as all replicas are profiled with
    assert spread(64, 8, 8) == [8, 16, 24, 32, 40, 48, 56, 64]
    assert spread(100, 6, 2) == [50, 50, 50, 100, 100, 100]
    assert min(spread(3, 20, 10)) == 1


def test_a_merged_batch_is_measured_when_the_base_is_wider():
    found = [point for point in points(config(tp_sizes=(2, 4)), 0) if isinstance(point, Decode)]
    assert max(point.batch for point in found if point.tp == 4) == 16
    assert max(point.batch for point in found if point.tp == 2) == 8


def test_no_two_points_have_one_name():
    named = [str(point) for point in points(config(), 0)]
    assert len(set(named)) == len(named)
