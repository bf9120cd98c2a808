"""Requests go on in this process: they get its handles, and those whose KV is here decode at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pat.engine import sglang_api as sg
from pat.engine.requests import Placed


def adopt(scheduler, req) -> None:
    """Give a request that came from bytes the handles of this process."""
    collector = scheduler.metrics_collector if scheduler.metrics_reporter.enable_metrics else None
    req.tokenizer, req.metrics_collector = scheduler.tokenizer, collector
    req.time_stats = sg.SchedulerReqTimeStats.new_from_obj(req.time_stats)
    req.time_stats.set_metrics_collector(collector)


def admit(scheduler, arrived: list[tuple[Placed, object, torch.Tensor]]) -> None:
    """Let requests whose KV is in the pool decode on: what SGLang does with KV that another process prefilled.

    arrived: each with SGLang's Req and the pool locations [kv_tokens - shared] of its KV after the shared prefix, in
    the order of ``place``. Their next step is a decode step; there is no prefill, not even of one token.
    """
    if not arrived:
        return
    tree, rows = scheduler.tree_cache, scheduler.req_to_token_pool
    for placed, req, locations in arrived:
        tokens = placed.request.kv_tokens
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
        [req for _, req, _ in arrived],
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
