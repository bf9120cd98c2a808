"""One change of tensor-parallel size, in a scheduler process, as a transaction over all ranks of the node.

agree -> quiesce -> collect -> move -> rebind -> resume. Every phase up to "move" ends with a vote: if any rank
failed, all of them put their own requests back and go on in the old layout (KV that was lost is prefilled again).
From "rebind" on a failure is fatal: the process ends with the error, and with it the engine.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist

from pat.engine import requests as unfinished
from pat.engine import sglang_api as sg
from pat.engine.board import Board
from pat.engine.groups import Groups
from pat.engine.kv import Exchange, Move, Pool
from pat.engine.requests import Unfinished
from pat.engine.settings import Settings
from pat.engine.weights import bind, build_model, check_bound
from pat.layout import Layout

log = logging.getLogger("sglang.pat")
PHASES = ("agree", "quiesce", "collect", "move", "rebind", "resume")


class SwitchAborted(RuntimeError):
    """The switch was undone; generation goes on in the old layout. The message says which rank failed and why."""


@dataclass
class Record:
    """One switch as one rank saw it; times are time.monotonic() seconds, one clock for all processes of a machine."""

    epoch: int
    tp_from: int
    tp_to: int
    kv: str  # "migrate" or "recompute"
    unfinished: int = 0  # of the whole group
    kv_tokens_moved: int = 0  # of the whole group
    kv_tokens_recomputed: int = 0  # of the whole group
    bytes_moved: int = 0  # sent by this rank to others
    exchange_s: float = 0.0  # of "move": the all-to-alls alone
    error: str | None = None
    ends: dict[str, float] = field(default_factory=dict)  # when each phase ended


class Switcher:
    """Holds what a rank keeps of every layout and carries out switches of one scheduler."""

    def __init__(self, scheduler, settings: Settings, groups: Groups, board: Board) -> None:
        self.scheduler, self.settings, self.groups, self.board = scheduler, settings, groups, board
        self.runner = scheduler.tp_worker.model_runner
        self.layout = Layout(settings.ranks, 1)
        self.epoch = 0
        self.votes = groups.votes
        self.pool = Pool(self.runner.token_to_kv_pool, self.runner.model_config.get_total_num_kv_heads())
        self.models = {1: self.runner.model}
        for tp in settings.tp_sizes:
            if tp > 1:
                self.models[tp] = build_model(self.runner, groups.topology[tp])
                bind(self.models[1], self.models[tp], Layout(settings.ranks, tp).tp_rank(groups.rank), tp)
                check_bound(self.models[1], self.models[tp])
        self.idle_sleeper = scheduler.idle_sleeper
        self.detokenizer = scheduler.ipc_channels.send_to_detokenizer.socket
        board.show_switch({}, 1, 0)

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def is_leader(self) -> bool:
        return self.layout.tp_rank(self.rank) == 0

    # --- the transaction -----------------------------------------------------------------------------------
    def switch(self, tp: int, epoch: int, kv: str) -> bool:
        """Change to ``tp``; the record goes to the board. True if done (or already there), False if undone."""
        record = self._record = Record(epoch, self.layout.tp, tp, kv)
        old, new = self.layout, Layout(self.settings.ranks, tp)
        try:
            self._phase("agree", lambda: self._agree(tp, epoch, kv))
            if old != new:
                locations = self._phase("quiesce", self._quiesce)
                mine = self._phase("collect", lambda: self._pack(locations, kv))
                requests = self._phase("collect", lambda: self._gather(mine))
                plan, exchange = self._phase("move", lambda: self._prepare(new, requests, locations))
                self._phase("move", lambda: self._exchange(new, exchange))
                self._phase("rebind", lambda: self._rebind(new), vote=False)
                self._phase("resume", lambda: self._resume(plan), vote=False)
        except SwitchAborted as error:
            record.error = str(error)
            log.error("PAT: switch %d from tp %d to tp %d undone: %s", epoch, old.tp, tp, error)
            self._roll_back(old)
        self.epoch = epoch
        self.board.show_switch(asdict(record), self.layout.tp, epoch)
        return record.error is None

    def _phase(self, name: str, work, vote: bool = True):
        """Run a phase or a part of one, time it, and (before rebind) let all ranks agree that it went well everywhere.

        What can fail on one rank alone has a vote of its own before the ranks exchange anything.
        """
        error, result = None, None
        if vote:
            try:
                result = work()
            except Exception as exception:
                log.exception("PAT rank %d failed in phase %s", self.rank, name)
                error = f"rank {self.rank}, phase {name}: {type(exception).__name__}: {exception}"
            errors = [None] * self.settings.ranks
            dist.all_gather_object(errors, error, group=self.votes)
            failed = [e for e in errors if e]
        else:
            result, failed = work(), []
        self._record.ends[name] = time.monotonic()
        if failed:
            raise SwitchAborted("; ".join(failed))
        return result

    def _agree(self, tp: int, epoch: int, kv: str) -> None:
        told = [None] * self.settings.ranks
        dist.all_gather_object(told, (tp, epoch, kv, self.layout.tp), group=self.votes)
        if tp not in self.models:
            raise ValueError(f"tp {tp} is not one of this engine's sizes {sorted(self.models)}")
        if len(set(told)) > 1:
            raise ValueError(f"ranks disagree on (tp, epoch, kv, present tp): {told}")
        if epoch != self.epoch + 1:
            raise ValueError(f"switch {epoch} does not follow switch {self.epoch}")

    def _quiesce(self) -> dict[str, torch.Tensor]:
        locations = unfinished.kv_locations(self.scheduler)
        self.scheduler.pause_generation(sg.PauseGenerationReqInput(mode="retract"))
        return locations

    def _pack(self, locations: dict[str, torch.Tensor], kv: str) -> bytes:
        """This replica's unfinished requests, from its leader."""
        kv_tokens = {rid: len(where) for rid, where in locations.items()} if kv == "migrate" else {}
        return unfinished.pack(self.scheduler.waiting_queue, kv_tokens) if self.is_leader else b""

    def _gather(self, mine: bytes) -> list[Unfinished]:
        """Every unfinished request of the group, in the same order on all ranks."""
        packed = [b""] * self.settings.ranks
        dist.all_gather_object(packed, mine, group=self.votes)
        return [
            request
            for replica, leader in enumerate(self.layout.leaders)
            for request in unfinished.unpack(packed[leader], replica)
        ]

    def _prepare(
        self, new: Layout, requests: list[Unfinished], locations: dict[str, torch.Tensor]
    ) -> tuple[list[tuple[Unfinished, int, torch.Tensor | None]], Exchange | None]:
        """Deal the requests to the new replicas and make room for their KV.

        Returns what this rank takes over (request, tokens of its shared prefix, pool locations of the rest), and
        the exchange that brings their KV, None if there is none to bring.
        """
        scheduler, record, rank = self.scheduler, self._record, self.rank
        targets = unfinished.assign(requests, new.dp)
        shared = unfinished.shared_prefixes(requests, targets)
        if not scheduler.flush_cache(empty_cache=False):
            raise RuntimeError("SGLang's cache could not be flushed: requests are still running")
        moves, here, there, plan = [], [], [], []
        for request, target, start in zip(requests, targets, shared, strict=True):
            move = Move(request.source, target, start, request.kv_tokens)
            fresh = None
            if target == new.replica(rank) and move.tokens:
                fresh = scheduler.token_to_kv_pool_allocator.alloc(move.tokens)
                if fresh is None:
                    raise MemoryError(f"no room for {move.tokens} tokens of KV of request {request.req.rid}")
            if target == new.replica(rank):
                plan.append((request, start, fresh))
            if move.tokens:
                mine = move.source == self.layout.replica(rank)
                moves.append(move)
                here.append(locations[request.req.rid][start:] if mine else None)
                there.append(fresh)
        record.unfinished = len(requests)
        record.kv_tokens_moved = sum(move.tokens for move in moves)
        record.kv_tokens_recomputed = sum(r.length for r in requests if not r.kv_tokens and r.req.output_ids)
        if not moves:
            return plan, None
        return plan, Exchange(self.layout, new, rank, self.pool.kv_heads, moves, here, there)

    def _exchange(self, new: Layout, exchange: Exchange | None) -> None:
        """Move the KV, layer by layer; every rank or none has something to exchange."""
        if exchange is None:
            return
        begin = time.monotonic()
        heads = [len(layout.kv_heads(self.rank, self.pool.kv_heads)) for layout in (self.layout, new)]
        for layer in range(self.pool.layers):
            old_kv, new_kv = (self.pool.layer(layer, count) for count in heads)
            self._record.bytes_moved += exchange.run_layer(old_kv, new_kv, self.groups.world.device_group)
        self._record.exchange_s = time.monotonic() - begin

    def _rebind(self, new: Layout) -> None:
        """Point SGLang at the new layout: context, groups, model, pool, sockets."""
        scheduler, runner = self.scheduler, self.runner
        self.groups.apply(new.tp)
        group = self.groups.tp_group(new.tp)
        runner.model = self.models[new.tp]
        runner.sampler.tp_sync_group = group.device_group
        for name in ("tp_group", "attn_tp_group", "dp_tp_group"):
            setattr(scheduler, name, group)
        for name in ("tp_cpu_group", "attn_tp_cpu_group", "dp_tp_cpu_group"):
            setattr(scheduler, name, group.cpu_group)
        scheduler.tp_size = new.tp
        self.pool.retype(len(new.kv_heads(self.rank, self.pool.kv_heads)))
        runner.init_attention_backends()
        self.layout = new
        # Only a leader streams tokens; a follower that slept would stall its leader's broadcasts.
        scheduler.ipc_channels.send_to_detokenizer.socket = self.detokenizer if self.is_leader else None
        scheduler.idle_sleeper = self.idle_sleeper if new.tp == 1 else None
        # Requests without a seed of their own draw from the process's generator: equal within a replica.
        sg.set_random_seed(self.runner.server_args.random_seed + 7919 * self._record.epoch + new.replica(self.rank))

    def _resume(self, plan: list[tuple[Unfinished, int, torch.Tensor | None]]) -> None:
        scheduler = self.scheduler
        scheduler.waiting_queue.clear()
        for request, shared, locations in plan:
            unfinished.adopt(scheduler, request.req)
            if locations is not None:
                unfinished.insert_kv(scheduler, request, shared, locations)
            scheduler._add_request_to_queue(request.req)
        scheduler.continue_generation(sg.ContinueGenerationReqInput(torch_empty_cache=False))

    def _roll_back(self, old: Layout) -> None:
        """Go on in the old layout with the requests that this rank had; their KV may be gone."""
        for req in self.scheduler.waiting_queue:
            unfinished.adopt(self.scheduler, req)
        if self.scheduler._engine_paused:
            self.scheduler.flush_cache(empty_cache=False)
            self.scheduler.continue_generation(sg.ContinueGenerationReqInput(torch_empty_cache=False))
