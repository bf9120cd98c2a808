"""Unfinished requests at a switch: find them, carry them to other ranks, choose what of their KV moves, go on."""

from __future__ import annotations

import bisect
import contextlib
import pickle
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from pat.engine import sglang_api as sg
from pat.engine.settings import KvCosts
from pat.layout import deal, rebalance

TOKEN = np.dtype(">i8")


@dataclass(frozen=True)
class Unfinished:
    """One unfinished request as every rank knows it: where it was, and how much of its KV exists."""

    req: object  # SGLang's Req
    source: int  # replica of the old layout
    kv_tokens: int  # tokens in KV, 0 when it must be prefilled anyway

    @property
    def tokens(self) -> array:
        """Tokens whose KV exists."""
        return (array("q", self.req.origin_input_ids) + array("q", self.req.output_ids))[: self.kv_tokens]

    @property
    def length(self) -> int:
        return len(self.req.origin_input_ids) + len(self.req.output_ids)


def kv_locations(scheduler) -> dict[str, torch.Tensor]:
    """{request id: pool locations of its KV, [tokens]} of every decoding request of this rank.

    A request that is still being prefilled (in chunks) or waits has no complete KV: it is prefilled again.
    """
    found = {}
    for batch in (scheduler.running_batch, scheduler.last_batch):
        for req in batch.reqs if batch is not None else ():
            if req.finished() or req.rid in found or not req.kv.holds_kv or not req.output_ids:
                continue
            tokens = len(req.origin_input_ids) + len(req.output_ids) - 1  # the newest token's KV comes next step
            if tokens != req.kv.kv_committed_len:
                continue
            row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :tokens]
            found[req.rid] = row.long()  # long() copies: the row is freed by the retraction
    return found


def pack(reqs: list, kv_tokens: dict[str, int]) -> bytes:
    """The requests as bytes, without the handles that belong to this process."""
    for req in reqs:
        req.tokenizer = None
        req.metrics_collector = None
        if hasattr(req.time_stats, "metrics_collector"):
            req.time_stats.metrics_collector = None
    return pickle.dumps([(req, kv_tokens.get(req.rid, 0)) for req in reqs])


def unpack(data: bytes, source: int) -> list[Unfinished]:
    return [Unfinished(req, source, kv_tokens) for req, kv_tokens in pickle.loads(data)]


def adopt(scheduler, req) -> None:
    """Give a request that came from bytes the handles of this process."""
    collector = scheduler.metrics_collector if scheduler.metrics_reporter.enable_metrics else None
    req.tokenizer, req.metrics_collector = scheduler.tokenizer, collector
    req.time_stats = sg.SchedulerReqTimeStats.new_from_obj(req.time_stats)
    req.time_stats.set_metrics_collector(collector)


def assign(requests: list[Unfinished], replicas: int) -> list[int]:
    """New replica of each request; the same on every rank."""
    return deal([request.length for request in requests], replicas)


class _Prefixes:
    """Token sequences, and how long a beginning a new one shares with any of them."""

    def __init__(self) -> None:
        self.sorted: list[bytes] = []  # big-endian, so that bytes are ordered as token ids are

    def shared(self, tokens: bytes) -> int:
        """Most tokens at the start of ``tokens`` that one of the others starts with: a neighbour in the order does."""
        at = bisect.bisect(self.sorted, tokens)
        return max((_common_tokens(tokens, other) for other in self.sorted[max(0, at - 1) : at + 1]), default=0)

    def add(self, tokens: bytes) -> None:
        bisect.insort(self.sorted, tokens)


def _common_tokens(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b)) // TOKEN.itemsize
    different = np.flatnonzero(np.frombuffer(a, TOKEN, length) != np.frombuffer(b, TOKEN, length))
    return int(different[0]) if len(different) else length


@dataclass(frozen=True)
class Placed:
    """Where an unfinished request goes, and what of its KV.

    shared: tokens at the start of its KV that an earlier request of the same target brings as well.
    """

    request: Unfinished
    target: int  # replica of the new layout
    shared: int


def place(
    requests: list[Unfinished],
    replicas: int,
    *,
    tokens: int,
    rows: int,
    sharing: bool,
    kv: str = "migrate",
    costs: KvCosts | None = None,
    same_layout: bool = False,
) -> list[Placed]:
    """Deal the requests to the replicas of the new layout, and choose for each whether its KV moves; pure.

    The KV of a request stays behind (kv_tokens 0: it is prefilled again) if ``kv`` is "recompute", where that is
    cheaper by ``costs`` (None: moving always is), or where it does not fit: a replica has room for ``tokens`` tokens,
    of which each request needs one more for its next step, and runs ``rows`` requests. sharing: whether the cache can
    share prefixes. same_layout: only as many requests leave their replica as it takes to make the counts even; those
    that stay keep their KV.
    """
    if same_layout:
        targets = rebalance([r.source for r in requests], [r.kv_tokens for r in requests], replicas)
    else:
        targets = assign(requests, replicas)
    requests = [
        replace(r, kv_tokens=0)
        if not (same_layout and r.source == target)
        and (kv == "recompute" or (costs and not costs.moving_is_cheaper(r.kv_tokens)))
        else r
        for r, target in zip(requests, targets, strict=True)
    ]
    earlier: dict[tuple, _Prefixes] = {}
    room, free_rows, placed = [tokens] * replicas, [rows] * replicas, []
    for request, target in zip(requests, targets, strict=True):
        shared = 0
        if request.kv_tokens:
            present = np.array(request.tokens, dtype=TOKEN).tobytes()
            there = earlier.setdefault((target, request.req.extra_key, request.req.cache_salt), _Prefixes())
            shared = there.shared(present) if sharing else 0
            needed = request.kv_tokens - shared + 1
            if needed <= room[target] and free_rows[target]:
                room[target] -= needed
                free_rows[target] -= 1
                there.add(present)
            else:
                request, shared = replace(request, kv_tokens=0), 0
        placed.append(Placed(request, target, shared))
    return placed


def admit(scheduler, arrived: list[tuple[Placed, torch.Tensor]]) -> None:
    """Let requests whose KV is in the pool decode on: what SGLang does with KV that another process prefilled.

    arrived: each with the pool locations [kv_tokens - shared] of its KV after the shared prefix, in the order of
    ``place``. Their next step is a decode step; there is no prefill, not even of one token.
    """
    if not arrived:
        return
    tree, rows = scheduler.tree_cache, scheduler.req_to_token_pool
    for placed, locations in arrived:
        request = placed.request
        req, tokens = request.req, request.kv_tokens
        req.refresh_fill_ids()
        match = sg.match_kv_cache(req, tree, req.full_untruncated_fill_ids, max_prefix_len=tokens)
        if match.cache_protected_len is None:
            req.kv.cache_protected_len = req.prefix_len
        if req.prefix_len != placed.shared:
            raise AssertionError(f"request {req.rid}: {req.prefix_len} tokens are in the cache, not {placed.shared}")
        req.lock = tree.lock(req.last_node)
        if rows.alloc([req]) is None:
            raise RuntimeError(f"no row for request {req.rid} in a pool of {rows.size}")
        if placed.shared:
            rows.write((req.kv.req_pool_idx, slice(0, placed.shared)), tree.prefix_device_indices(req))
        rows.write((req.kv.req_pool_idx, slice(placed.shared, tokens)), locations)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = tokens
        sg.checkpoint_kv_cache(req, tree)  # now, so that the next request finds what it shares
    batch = sg.ScheduleBatch.init_new(
        [placed.request.req for placed, _ in arrived],
        rows,
        scheduler.token_to_kv_pool_allocator,
        tree,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    batch.prepare_for_prebuilt()
    last = torch.tensor([req.output_ids[-1] for req in batch.reqs], dtype=torch.int64, device=batch.device)
    scheduler.future_map.stash(batch.req_pool_indices, sg.RelayPayload(bonus_tokens=last))
    scheduler.running_batch = batch


@contextlib.contextmanager
def hidden_states_once(batch) -> Iterator[None]:
    """Around SGLang's handling of a step's results: a request that is prefilled again gets one new hidden state.

    SGLang would add those of its whole context, most of which it has had.
    """
    again = [
        (req, len(req.hidden_states))
        for req in (batch.reqs if batch.return_hidden_states and batch.forward_mode.is_extend() else ())
        if req.return_hidden_states is True and req.output_ids
    ]
    yield
    for req, before in again:
        if len(req.hidden_states) > before:  # a list of [hidden] for each token of the context, as if it were one
            req.hidden_states[before:] = [req.hidden_states[before][-1]]
