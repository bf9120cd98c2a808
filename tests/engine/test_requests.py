"""Unfinished requests at a switch: what of their KV is shared, where they go, and what is carried along."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.engine.requests import Unfinished, assign, kv_locations, place
from pat.engine.settings import KvCosts

TOKENS = st.lists(st.integers(0, 2), max_size=6)  # few tokens, so that many requests share a beginning


def request(prompt, output=(), kv_tokens=None, extra_key=None, cache_salt=None, source=0) -> Unfinished:
    text = np.array([*prompt, *output], np.int64)
    kv_tokens = len(text) if kv_tokens is None else kv_tokens
    return Unfinished("r", source, len(prompt), len(output), kv_tokens, extra_key, cache_salt, text)


def in_kv(one: Unfinished) -> list[int]:
    return one.text[: one.kv_tokens].tolist()


@st.composite
def requests(draw):
    prompt, output = draw(TOKENS), draw(TOKENS)
    kv_tokens = draw(st.integers(0, len(prompt) + len(output)))
    return request(prompt, output, kv_tokens, draw(st.sampled_from([None, "a"])), draw(st.sampled_from([None, "s"])))


SOME = st.lists(requests(), max_size=12)
PLENTY = {"tokens": 10_000, "rows": 100, "sharing": True, "costs": None}


def branch(placed):
    """What must be equal for two requests to share KV."""
    return placed.target, placed.request.extra_key, placed.request.cache_salt


@settings(deadline=None)
@given(SOME, st.integers(1, 3))
def test_a_prefix_is_shared_if_an_earlier_request_of_the_target_has_it(some, replicas):
    there = set()
    for placed in place(some, replicas, **PLENTY):
        tokens = in_kv(placed.request)
        prefixes = [(branch(placed), tuple(tokens[: i + 1])) for i in range(len(tokens))]
        assert placed.shared == sum(prefix in there for prefix in prefixes)
        there.update(prefixes)


@settings(deadline=None)
@given(SOME, st.integers(1, 3))
def test_each_distinct_token_of_a_target_is_moved_once(some, replicas):
    placed = place(some, replicas, **PLENTY)
    distinct = {
        (branch(one), tuple(in_kv(one.request)[:end])) for one in placed for end in range(1, one.request.kv_tokens + 1)
    }
    assert sum(one.request.kv_tokens - one.shared for one in placed) == len(distinct)


@settings(deadline=None)
@given(SOME, st.integers(1, 3), st.integers(0, 40), st.integers(0, 5), st.booleans())
def test_what_does_not_fit_stays_behind_and_nothing_is_lost(some, replicas, tokens, rows, sharing):
    placed = place(some, replicas, tokens=tokens, rows=rows, sharing=sharing, costs=None)
    assert [one.request.text.tolist() for one in placed] == [one.text.tolist() for one in some]
    assert [one.target for one in placed] == assign(some, replicas)
    for replica in range(replicas):
        moved = [one for one in placed if one.target == replica and one.request.kv_tokens]
        assert len(moved) <= rows
        assert sum(one.request.kv_tokens - one.shared + 1 for one in moved) <= tokens
    if not sharing:
        assert not any(one.shared for one in placed)


def test_kv_moves_where_that_is_cheaper():
    some = [request([1] * 3), request([2] * 30), request([3] * 300)]
    per_token = KvCosts(1.0, 0.0, 2.0, 0.0)
    per_request = KvCosts(1.0, 100.0, 2.0, 0.0)  # pays from 100 tokens on
    never = KvCosts(2.0, 0.0, 1.0, 0.0)

    def moved(costs):
        return [one.request.kv_tokens for one in place(some, 1, **PLENTY | {"costs": costs})]

    assert (moved(None), moved(per_token)) == ([3, 30, 300], [3, 30, 300])
    assert (moved(per_request), moved(never)) == ([0, 0, 300], [0, 0, 0])
    assert KvCosts.from_message(per_request.to_message()) == per_request


@pytest.mark.parametrize("kv", ["migrate", "recompute"])
def test_at_a_rebalance_those_that_stay_keep_their_kv(kv):
    some = [request([i] * 9, [1] * i, source=0) for i in range(5)] + [request([9], source=1)]
    placed = place(some, 2, **PLENTY | {"kv": kv}, same_layout=True)
    assert [one.target for one in placed] == [1, 1, 0, 0, 0, 1]  # the two with the least KV move
    assert [one.request.kv_tokens for one in placed] == [*((9, 10) if kv == "migrate" else (0, 0)), 11, 12, 13, 1]


def test_samples_of_one_prompt_share_the_prompt():
    some = [request([5, 6, 7], output) for output in ([1], [2, 3], [2, 4])]
    assert [one.shared for one in place(some, 1, **PLENTY)] == [0, 3, 4]


def test_a_request_without_kv_neither_shares_nor_is_shared():
    some = [request([5, 6], kv_tokens=0), request([5, 6]), request([5, 6, 7], kv_tokens=0)]
    assert [one.shared for one in place(some, 1, **PLENTY)] == [0, 0, 0]


@pytest.mark.parametrize("difference", [{"extra_key": "other"}, {"cache_salt": "other"}])
def test_requests_that_the_radix_tree_keeps_apart_share_nothing(difference):
    some = [request([1, 2]), request([1, 2], **difference)]
    assert [one.shared for one in place(some, 1, **PLENTY)] == [0, 0]


@settings(deadline=None)
@given(some=st.lists(requests(), max_size=20), replicas=st.integers(1, 4))
def test_requests_are_spread_evenly_and_by_their_length(some, replicas):
    targets = assign(some, replicas)
    counts = [targets.count(replica) for replica in range(replicas)]
    assert sum(counts) == len(some)
    assert max(counts) - min(counts) <= 1
    longest = sorted(some, key=lambda one: -one.length)[:replicas]
    limit = longest[-1].length if longest else 0  # what is longer than that is among the first to be dealt
    first = [targets[i] for i, one in enumerate(some) if one.length > limit]
    assert len(set(first)) == len(first)


def fake_req(rid, row, prompt, output, finished=False, holds_kv=True, committed=None):
    committed = prompt + output - 1 if committed is None else committed
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[0] * prompt,
        output_ids=[0] * output,
        finished=lambda: finished,
        kv=SimpleNamespace(holds_kv=holds_kv, req_pool_idx=row, kv_committed_len=committed),
    )


def test_only_decoding_requests_have_kv_to_move():
    table = torch.arange(60, dtype=torch.int32).view(6, 10)
    running = [
        fake_req("decoding", 1, 4, 3),
        fake_req("finished", 2, 4, 3, finished=True),
        fake_req("no kv", 3, 4, 3, holds_kv=False),
        fake_req("no token yet", 4, 4, 0, committed=4),
        fake_req("half prefilled", 5, 4, 3, committed=2),
    ]
    last = SimpleNamespace(reqs=[fake_req("just prefilled", 0, 5, 1), running[0]])
    pool = SimpleNamespace(req_to_token=table)
    scheduler = SimpleNamespace(running_batch=SimpleNamespace(reqs=running), last_batch=last, req_to_token_pool=pool)
    found = kv_locations(scheduler)
    table.fill_(-1)  # SGLang frees the rows; the answer must not change with them
    assert {rid: where.tolist() for rid, where in found.items()} == {
        "decoding": [10, 11, 12, 13, 14, 15],
        "just prefilled": [0, 1, 2, 3, 4],
    }
    scheduler.last_batch = None
    assert set(kv_locations(scheduler)) == {"decoding"}
