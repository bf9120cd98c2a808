"""Unfinished requests at a switch: where their KV is, where they go, and what of their KV moves."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace

import numpy as np
import torch

from pat.engine.settings import KvCosts
from pat.layout import deal, rebalance

TOKEN = np.dtype(">i8")


@dataclass(frozen=True, eq=False)
class Unfinished:
    """One unfinished request as every rank knows it: where it was, how long it is, how much of its KV exists.

    text: ids of its prompt's and its response's tokens, [prompt + generated] int64; where it is known which other
    requests share a part of it, extra_key and cache_salt are equal. body: the rest of it, as bytes (``bodies``).
    """

    rid: str
    source: int  # replica of the old layout
    prompt: int  # tokens
    generated: int  # tokens
    kv_tokens: int  # tokens in KV, 0 when it must be prefilled anyway
    extra_key: str | None
    cache_salt: str | None
    text: np.ndarray
    body: np.ndarray | None = None

    @property
    def length(self) -> int:
        return self.prompt + self.generated


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
    # Equal is equal in any order of bytes, and in this machine's own the comparison is fast.
    different = np.frombuffer(a, np.int64, length) != np.frombuffer(b, np.int64, length)
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


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
            there = earlier.setdefault((target, request.extra_key, request.cache_salt), _Prefixes())
            present = request.text[: request.kv_tokens].astype(TOKEN).tobytes() if sharing else b""
            shared = there.shared(present) if sharing else 0
            needed = request.kv_tokens - shared + 1
            if needed <= room[target] and free_rows[target]:
                room[target] -= needed
                free_rows[target] -= 1
                if sharing:
                    there.add(present)
            else:
                request, shared = replace(request, kv_tokens=0), 0
        placed.append(Placed(request, target, shared))
    return placed
