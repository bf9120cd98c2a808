"""KV under another layout: who sends which heads, and real exchanges among four processes.

Every KV number encodes K or V, layer, head, token and dim, so that a wrong slice is named; the rest is NaN.
"""

import itertools
import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pat.engine.kv import Exchange, Move, Pool, senders
from pat.layout import Layout

KV_HEADS = (1, 2, 4, 8)
WORLD = 4
LAYERS, SLOTS, HEAD_DIMS = (
    2,
    160,
    (3, 5),
)  # K and V differ in their last dimension, so that a mix-up cannot pass
DEADLINE_S = 120.0
LIMITS = (1 << 20, 200)  # bytes received at a time: all at once, and in many chunks
CASES = list(itertools.product(KV_HEADS, (1, 2, 4), (1, 2, 4)))


def pairs(ranks: int):
    sizes = [tp for tp in (1, 2, 4, 8) if tp <= ranks]
    return itertools.product(KV_HEADS, sizes, sizes)


@pytest.mark.parametrize("ranks", [4, 8])
def test_each_head_comes_once_from_a_rank_that_holds_it(ranks):
    for kv_heads, tp_from, tp_to in pairs(ranks):
        old, new = Layout(ranks, tp_from), Layout(ranks, tp_to)
        for source, receiver in itertools.product(range(old.dp), range(ranks)):
            sent = senders(old, new, source, receiver, kv_heads)
            heads = [head for taken in sent.values() for head in taken]
            assert sorted(heads) == list(new.kv_heads(receiver, kv_heads))
            for sender, taken in sent.items():
                assert sender in old.replicas[source]
                assert set(taken) <= set(old.kv_heads(sender, kv_heads))


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_head_that_the_receiver_holds_does_not_travel(ranks):
    for kv_heads, tp_from, tp_to in pairs(ranks):
        old, new = Layout(ranks, tp_from), Layout(ranks, tp_to)
        for receiver in range(ranks):
            sent = senders(old, new, old.replica(receiver), receiver, kv_heads)
            kept = set(old.kv_heads(receiver, kv_heads)) & set(new.kv_heads(receiver, kv_heads))
            assert kept == set(sent.get(receiver, ()))


@dataclass
class Plan:
    """A random set of requests between two layouts, the same on every rank.

    moves; before, after: (token numbers, locations in the pool of the old or new replica) of each move. Equal
    prefixes of requests are equal tokens, and are moved once a target.
    """

    moves: list[Move]
    before: list[tuple[np.ndarray, np.ndarray]]
    after: list[tuple[np.ndarray, np.ndarray]]

    @classmethod
    def draw(cls, old: Layout, new: Layout, seed: int) -> "Plan":
        rng = np.random.default_rng(seed)
        prompts = [tuple(rng.integers(0, 9, rng.integers(1, 7))) for _ in range(3)]
        texts = [prompts[i % 3] + tuple(rng.integers(0, 9, rng.integers(0, 6))) for i in range(14)]
        numbers: dict[tuple, int] = {}  # of a token: by all that it follows
        free_old = [list(rng.permutation(SLOTS)) for _ in range(old.dp)]
        free_new = [list(rng.permutation(SLOTS)) for _ in range(new.dp)]
        there: set[tuple[int, tuple]] = set()
        plan = cls([], [], [])
        for text in texts:
            source, target = int(rng.integers(old.dp)), int(rng.integers(new.dp))
            prefixes = [text[: i + 1] for i in range(len(text))]
            start = sum((target, prefix) in there for prefix in prefixes)
            there |= {(target, prefix) for prefix in prefixes}
            tokens = np.array([numbers.setdefault(prefix, len(numbers)) for prefix in prefixes[start:]], int)
            old_at, new_at = (
                np.array([free.pop() for _ in tokens], int) for free in (free_old[source], free_new[target])
            )
            if len(tokens):
                plan.moves.append(Move(source, target, start, len(text)))
                plan.before.append((tokens, old_at))
                plan.after.append((tokens, new_at))
        return plan

    def exchange(self, old: Layout, new: Layout, rank: int, kv_heads: int, **limit) -> Exchange:
        here = [
            torch.tensor(at) if move.source == old.replica(rank) else None
            for move, (_, at) in zip(self.moves, self.before, strict=True)
        ]
        there = [
            torch.tensor(at) if move.target == new.replica(rank) else None
            for move, (_, at) in zip(self.moves, self.after, strict=True)
        ]
        like = [torch.empty(1, dim) for dim in HEAD_DIMS]
        exchange = Exchange(old, new, rank, kv_heads, self.moves, like, **limit)
        exchange.locate(here, there)
        return exchange


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_plan_writes_each_token_and_head_once_and_both_sides_agree_on_it(ranks):
    for number, (kv_heads, tp_from, tp_to) in enumerate(pairs(ranks)):
        old, new = Layout(ranks, tp_from), Layout(ranks, tp_to)
        plan = Plan.draw(old, new, number)
        exchanges = [plan.exchange(old, new, rank, kv_heads) for rank in range(ranks)]
        for rank, exchange in enumerate(exchanges):
            into = {peer: exchange.pairs[peer, rank].into for peer in exchange.receives}
            written = Counter(
                (int(at), head)
                for peer, index in exchange.receives.items()
                for at in index
                for head in range(into[peer].start, into[peer].stop)
            )
            wanted = Counter(
                (int(at), head)
                for move, (_, where) in zip(plan.moves, plan.after, strict=True)
                if move.target == new.replica(rank)
                for at in where
                for head in range(len(new.kv_heads(rank, kv_heads)))
            )
            assert written == wanted
            for peer, index in exchange.sends.items():
                assert len(index) == len(exchanges[peer].receives[rank]) == exchange.pairs[rank, peer].tokens
            assert {peer for peer, e in enumerate(exchanges) if rank in e.receives} == set(exchange.sends)


@pytest.mark.parametrize("limit_bytes", [40, 400, 1 << 20])
def test_what_is_received_at_a_time_is_bounded_and_all_ranks_count_the_same_chunks(limit_bytes):
    for number, (kv_heads, tp_from, tp_to) in enumerate(pairs(8)):
        old, new = Layout(8, tp_from), Layout(8, tp_to)
        plan = Plan.draw(old, new, number)
        exchanges = [plan.exchange(old, new, rank, kv_heads, limit_bytes=limit_bytes) for rank in range(8)]
        assert len({tuple(exchange.passes) for exchange in exchanges}) == 1
        for exchange in exchanges:
            least = max(HEAD_DIMS) * sum(  # a token of each peer
                pair.heads for (_, receiver), pair in exchange.pairs.items() if receiver == exchange.rank
            )
            assert exchange.incoming.nbytes <= max(limit_bytes, least * 4)
            sent = [pair for (sender, _), pair in exchange.pairs.items() if sender == exchange.rank]
            layer = sum(pair.tokens * pair.heads for pair in sent) * sum(HEAD_DIMS) * 4
            assert exchange.outgoing.nbytes <= (layer if len(exchange.passes) == 1 else layer * 5 / 8)
            assert (len(exchange.passes) == 1) == (limit_bytes == 1 << 20)


# --- four real processes --------------------------------------------------------------------------------
def code(kind: int, layer: int, head: int, token: np.ndarray, dim: int) -> np.ndarray:
    """A number that says where it belongs; exact in float32."""
    return (((kind * LAYERS + layer) * 8 + head) * 8 + dim) * 256.0 + token


def decoded(value: float) -> str:
    if np.isnan(value):
        return "nothing"
    rest, token = divmod(int(value), 256)
    rest, dim = divmod(rest, 8)
    rest, head = divmod(rest, 8)
    kind, layer = divmod(rest, LAYERS)
    return f"{'KV'[kind]} layer {layer} head {head} token {token} dim {dim}"


def fill(view: torch.Tensor, kind: int, layer: int, heads: range, tokens: np.ndarray, at: np.ndarray) -> None:
    for local, head in enumerate(heads):
        for dim in range(view.shape[-1]):
            view[at, local, dim] = torch.from_numpy(code(kind, layer, head, tokens, dim)).float()


def pool_of(keys, values, tokens: int, kv_heads: int) -> Pool:
    kind = {"kv_cache_layout": "nhd", "post_capture_active": False}
    return Pool(SimpleNamespace(k_buffer=keys, v_buffer=values, **kind), SimpleNamespace(size=tokens), kv_heads, tokens)


def move_and_compare(kv_heads: int, old: Layout, new: Layout, rank: int, seed: int, limit_bytes: int) -> dict:
    """Carry out one plan; {"sent": bytes that left this rank, "wrong": the first wrong number or None}."""
    plan = Plan.draw(old, new, seed)
    storage = [[torch.full((SLOTS, kv_heads, d), torch.nan) for _ in range(LAYERS)] for d in HEAD_DIMS]
    pool = pool_of(storage[0], storage[1], SLOTS - 1, kv_heads)
    old_heads, new_heads = old.kv_heads(rank, kv_heads), new.kv_heads(rank, kv_heads)
    exchange, sent, wrong = plan.exchange(old, new, rank, kv_heads, limit_bytes=limit_bytes), 0, None
    for layer in range(LAYERS):
        old_kv, new_kv = pool.layer(layer, len(old_heads)), pool.layer(layer, len(new_heads))
        for move, (tokens, at) in zip(plan.moves, plan.before, strict=True):
            if move.source == old.replica(rank):
                for kind in (0, 1):
                    fill(old_kv[kind], kind, layer, old_heads, tokens, at)
        expected = [storage[kind][layer].clone() for kind in (0, 1)]
        for move, (tokens, at) in zip(plan.moves, plan.after, strict=True):
            if move.target == new.replica(rank):
                for kind in (0, 1):
                    shape = new_kv[kind].shape
                    view = expected[kind].view(-1)[: new_kv[kind].numel()].view(shape)
                    fill(view, kind, layer, new_heads, tokens, at)
        sent += exchange.run_layer(old_kv, new_kv, dist.group.WORLD)
        for kind in (0, 1):
            got, want = storage[kind][layer].view(-1), expected[kind].view(-1)
            differ = ~((got == want) | (got.isnan() & want.isnan()))
            if wrong is None and differ.any():
                first = int(differ.nonzero()[0])
                wrong = f"{decoded(float(got[first]))} stands where {decoded(float(want[first]))} belongs"
    return {"sent": sent, "wrong": wrong}


def run_all_cases(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD, timeout=limit)
    results = [
        [
            move_and_compare(kv_heads, Layout(WORLD, tp_from), Layout(WORLD, tp_to), rank, seed, limit_bytes)
            for limit_bytes in LIMITS
        ]
        for seed, (kv_heads, tp_from, tp_to) in enumerate(CASES)
    ]
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(results, file)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """{case: result of each rank} of the whole matrix, run by four processes in one process group."""
    folder = tmp_path_factory.mktemp("exchange")
    processes = torch.multiprocessing.spawn(run_all_cases, (str(folder),), WORLD, join=False)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not processes.join(timeout=1.0):  # raises what a process raised
            assert time.monotonic() < deadline, "the exchanges did not end"
    finally:
        for process in processes.processes:
            process.kill()
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
    return {case: [result[number] for result in results] for number, case in enumerate(CASES)}


def bytes_between_ranks(plan: Plan, kv_heads: int, old: Layout, new: Layout) -> int:
    """What has to travel: each token's heads to each rank of its target, unless that rank held them."""
    total = 0
    for move in plan.moves:
        for receiver in new.replicas[move.target]:
            needed = set(new.kv_heads(receiver, kv_heads))
            if receiver in old.replicas[move.source]:
                needed -= set(old.kv_heads(receiver, kv_heads))
            total += move.tokens * len(needed) * sum(HEAD_DIMS) * LAYERS * 4
    return total


@pytest.mark.parametrize("case", CASES, ids=lambda case: "kv{}-tp{}-to-tp{}".format(*case))
def test_four_processes_put_every_head_where_it_belongs_and_touch_nothing_else(exchanged, case):
    assert [[one["wrong"] for one in results] for results in exchanged[case]] == [[None] * len(LIMITS)] * WORLD


@pytest.mark.parametrize("case", CASES, ids=lambda case: "kv{}-tp{}-to-tp{}".format(*case))
def test_no_byte_travels_that_need_not(exchanged, case):
    kv_heads, tp_from, tp_to = case
    old, new = Layout(WORLD, tp_from), Layout(WORLD, tp_to)
    plan = Plan.draw(old, new, CASES.index(case))
    sent = [sum(results[way]["sent"] for results in exchanged[case]) for way in range(len(LIMITS))]
    assert sent == [bytes_between_ranks(plan, kv_heads, old, new)] * len(LIMITS)


@pytest.mark.parametrize(("heads", "tokens"), [(8, 99), (4, 199), (2, 399), (1, 799), (3, 265)])
def test_fewer_heads_a_token_leave_room_for_more_tokens(heads, tokens):
    storage = [torch.zeros(100, 8, dim) for dim in HEAD_DIMS]
    pool = pool_of(storage[:1], storage[1:], 99, 8)
    assert pool.tokens(heads) == tokens
    for view, dim in zip(pool.layer(0, heads), HEAD_DIMS, strict=True):
        assert view.shape == (tokens + 1, heads, dim)
        view.fill_(1.0)
    assert all(base.sum() <= base.numel() for base in storage)


def test_a_pool_of_another_layout_is_refused():
    pool = SimpleNamespace(kv_cache_layout="hnd", post_capture_active=False)
    with pytest.raises(ValueError, match="layout 'hnd'"):
        Pool(pool, SimpleNamespace(size=1), 1, 1)


def test_the_matrix_moves_shared_prefixes_once_and_something_in_every_case():
    plans = [Plan.draw(Layout(WORLD, a), Layout(WORLD, b), seed) for seed, (_, a, b) in enumerate(CASES)]
    assert all(plan.moves for plan in plans)
    assert all(any(move.start for move in plan.moves) for plan in plans)
