"""One rank's part in handing the unfinished requests over to a new layout: who goes where, with which KV."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from pat.engine import bodies
from pat.engine import requests as unfinished
from pat.engine.kv import Exchange, Move, Pool
from pat.engine.requests import Placed
from pat.engine.resume import admit, adopt
from pat.engine.settings import KvCosts, Settings
from pat.engine.transaction import Record
from pat.layout import Layout


@dataclass(frozen=True)
class Order:
    """What the engine asks of all ranks. costs: for "auto", what moving and prefilling a request's KV take.

    rebalance: if ``tp`` is the present size, spread the unfinished requests anew.
    """

    tp: int
    epoch: int
    kv: str
    costs: KvCosts | None = None
    rebalance: bool = False


class Handover:
    """Of one switch from ``old`` to ``new``. Each method is a phase's work; nothing is undone here.

    The requests stay what they are on the ranks that have them until ``resume``.
    """

    def __init__(
        self, scheduler, settings: Settings, pool: Pool, rank: int, layouts: tuple[Layout, Layout], record: Record
    ) -> None:
        self.scheduler, self.settings, self.pool, self.rank, self.record = scheduler, settings, pool, rank, record
        self.old, self.new = layouts
        self.locations: dict[str, torch.Tensor] = {}
        self.taken: list[tuple[Placed, torch.Tensor | None]] = []  # what this rank takes over, where its KV will be
        self.reqs: dict[str, object] = {}  # SGLang's Req of each
        self.kv: Exchange | None = None

    def _file(self, rank: int):
        return self.settings.path / f"requests.{self.record.epoch}.{rank}"

    @property
    def _leads(self) -> bool:
        return self.old.tp_rank(self.rank) == 0

    def collect(self, locations: dict[str, torch.Tensor]) -> list[bodies.Row]:
        """The unfinished requests of this rank's replica, whose bodies are in its file; of a follower none."""
        self.locations = locations
        if not self._leads:
            return []
        kv_tokens = {rid: len(where) for rid, where in locations.items()}
        return bodies.write(self.scheduler.waiting_queue, kv_tokens, self._file(self.rank))

    def prepare(self, rows: list[list[bodies.Row]], order: Order) -> None:
        """Deal the requests, ``rows`` of each rank, to the new replicas, and make room for their KV."""
        scheduler = self.scheduler
        requests = [
            request
            for replica, leader in enumerate(self.old.leaders)
            for request in bodies.read(rows[leader], replica, self._file(leader))
        ]
        heads = len(self.new.kv_heads(self.rank, self.pool.kv_heads))
        placed = unfinished.place(
            requests,
            self.new.dp,
            tokens=self.pool.tokens(heads),
            rows=min(scheduler.req_to_token_pool.size, scheduler.max_running_requests),
            sharing=scheduler.tree_cache.supports_prefix_sharing(),
            kv=order.kv,
            costs=order.costs,
            same_layout=self.new == self.old,
        )
        moves = [Move(p.request.source, p.target, p.shared, p.request.kv_tokens) for p in placed]
        movable = [move for move in moves if move.tokens]
        if movable:  # its memory first, while nothing has been touched
            like = (self.pool.base_k[0], self.pool.base_v[0])
            self.kv = Exchange(self.old, self.new, self.rank, self.pool.kv_heads, movable, like)
        if not scheduler.flush_cache(empty_cache=False):
            raise RuntimeError("SGLang's cache could not be flushed: requests are still running")
        self.pool.resize(heads)
        here, there = self._locate(placed, moves)
        if self.kv is not None:
            self.kv.locate(here, there)
        stays = self.new == self.old  # then what stays at its replica is not counted as moved
        record = self.record
        record.unfinished = len(requests)
        record.requests_moved = sum(not stays or p.target != p.request.source for p in placed)
        record.kv_tokens_moved = sum(move.tokens for move in moves if not stays or move.source != move.target)
        record.kv_tokens_recomputed = sum(
            p.request.length for p in placed if not p.request.kv_tokens and p.request.generated
        )

    def _locate(
        self, placed: list[Placed], moves: list[Move]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Pool locations of each move that has tokens, before and after; None where this rank has no part in it."""
        here, there = [], []
        for item, move in zip(placed, moves, strict=True):
            request, fresh = item.request, None
            if item.target == self.new.replica(self.rank):
                if request.kv_tokens:
                    fresh = self.scheduler.token_to_kv_pool_allocator.alloc(move.tokens)
                    if fresh is None:
                        raise MemoryError(f"no room for {move.tokens} tokens of KV of request {request.rid}")
                self.taken.append((item, fresh))
            if move.tokens:
                mine = move.source == self.old.replica(self.rank)
                here.append(self.locations[request.rid][item.shared :] if mine else None)
                there.append(fresh)
        return here, there

    def exchange(self, group) -> None:
        """Take over the bodies, and move the KV layer by layer over ``group``: every rank or none has some to move."""
        # The leader of a replica wrote what it holds itself: what stays with it is there already.
        own = {req.rid: req for req in self.scheduler.waiting_queue} if self._leads else {}
        for item, _ in self.taken:
            rid, source = item.request.rid, item.request.source
            stays = self._leads and source == self.old.replica(self.rank)
            self.reqs[rid] = own[rid] if stays else bodies.unpack(item.request)
        if self.kv is None:
            return
        begin = time.monotonic()
        heads = [len(layout.kv_heads(self.rank, self.pool.kv_heads)) for layout in (self.old, self.new)]
        for layer in range(self.pool.layers):
            old_kv, new_kv = (self.pool.layer(layer, count) for count in heads)
            self.record.bytes_moved += self.kv.run_layer(old_kv, new_kv, group)
        self.record.exchange_s = time.monotonic() - begin

    def resume(self) -> None:
        """Let what this rank has taken over go on."""
        scheduler = self.scheduler
        scheduler.waiting_queue.clear()
        for req in self.reqs.values():
            adopt(scheduler, req)
        admit(scheduler, [(item, self.reqs[item.request.rid], at) for item, at in self.taken if at is not None])
        for item, where in self.taken:
            if where is None:
                scheduler._add_request_to_queue(self.reqs[item.request.rid])

    def close(self) -> None:
        """Nobody reads this rank's file any more: all have been through ``exchange``, or it was undone."""
        self._file(self.rank).unlink(missing_ok=True)
