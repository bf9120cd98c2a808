"""Unfinished requests at a switch: find them, take them out, carry them to other ranks, put them back."""

from __future__ import annotations

import pickle
from array import array
from dataclasses import dataclass

import numpy as np
import torch

from pat.engine import sglang_api as sg
from pat.layout import deal


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

    def prefix_key(self, tokens: array):
        return sg.RadixKey(tokens, extra_key=self.req.extra_key, cache_salt=self.req.cache_salt)


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
    req.tokenizer = scheduler.tokenizer
    req.time_stats = sg.SchedulerReqTimeStats.new_from_obj(req.time_stats)


def assign(requests: list[Unfinished], replicas: int) -> list[int]:
    """New replica of each request; the same on every rank."""
    return deal([request.length for request in requests], replicas)


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def shared_prefixes(requests: list[Unfinished], targets: list[int]) -> list[int]:
    """Tokens at the start of each request's KV that an earlier request of the same target brings as well.

    Samples of one prompt share it; it is moved once a target. What a radix tree matches when the requests are
    inserted in this order.
    """
    seen: dict[tuple, list[np.ndarray]] = {}
    shared = []
    for request, target in zip(requests, targets, strict=True):
        tokens = np.frombuffer(request.tokens, dtype=np.int64) if request.kv_tokens else np.empty(0, np.int64)
        earlier = seen.setdefault((target, request.req.extra_key, request.req.cache_salt), [])
        shared.append(max((_common_prefix(tokens, other) for other in earlier), default=0))
        if len(tokens):
            earlier.append(tokens)
    return shared


def insert_kv(scheduler, request: Unfinished, shared: int, locations: torch.Tensor) -> None:
    """Enter moved KV into the radix tree, so that the request's next prefill is an extend by one token.

    locations: pool locations [kv_tokens - shared] of the tokens after the shared prefix.
    """
    tree = scheduler.tree_cache
    tokens = request.tokens
    prefix = locations.new_empty(0)
    if shared:
        match = tree.match_prefix(sg.MatchPrefixParams(key=request.prefix_key(tokens)))
        if match.device_prefix_len != shared:
            raise AssertionError(
                f"request {request.req.rid}: {match.device_prefix_len} tokens of its KV are in the tree, not {shared}"
            )
        prefix = tree.path_device_indices(match.last_device_node)[:shared]
    tree.insert(
        sg.InsertParams(key=request.prefix_key(tokens), value=torch.cat([prefix, locations]), prev_prefix_len=shared)
    )
