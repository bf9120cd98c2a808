"""One change of tensor-parallel size, in a scheduler process, as a transaction over all ranks of the node.

agree -> quiesce -> collect -> move -> rebind -> resume. Every phase up to "move" ends with a vote: if any rank
failed, all of them put their own requests back and go on in the old layout (KV that was lost is prefilled again).
A rank that does not vote within the deadline, and any failure from "rebind" on, is fatal: the process ends with an
error that names the rank, and with it the engine.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict

import torch
import torch.distributed as dist

from pat.engine import draw
from pat.engine import sglang_api as sg
from pat.engine.board import Board
from pat.engine.errors import SwitchError
from pat.engine.faults import Faults
from pat.engine.groups import Groups
from pat.engine.handover import Handover, Order
from pat.engine.kv import Pool
from pat.engine.one_device import BREAKABLE
from pat.engine.resume import adopt
from pat.engine.rows import FusedRows
from pat.engine.runtime import Runtimes
from pat.engine.settings import Settings
from pat.engine.stop import Stop
from pat.engine.transaction import Record, SwitchAborted, Transaction
from pat.engine.weights import Place, bind, build_model, check_bound
from pat.layout import Layout

log = logging.getLogger("sglang.pat")
# Parts of SGLang's scheduler that keep the pool's size for themselves.
CAPACITY_HOLDERS = ("pool_stats_observer", "invariant_checker", "kv_events_publisher", "load_inquirer")


class Switcher:
    """Holds what a rank keeps of every layout and carries out switches of one scheduler."""

    def __init__(self, scheduler, settings: Settings, groups: Groups, board: Board) -> None:
        self.scheduler, self.settings, self.groups, self.board = scheduler, settings, groups, board
        self.runner = scheduler.tp_worker.model_runner
        sg.check_scheduler(scheduler)
        self.base = self.layout = Layout(settings.ranks, settings.base)
        self.epoch, self._record = 0, None
        kv_heads = self.runner.model_config.get_total_num_kv_heads()
        # Each rank has sized its pool by what was free on its device; in a replica all must decide alike.
        Faults(settings.path, groups.rank).strike("start")
        tokens = torch.tensor(scheduler.token_to_kv_pool_allocator.size)
        dist.all_reduce(tokens, dist.ReduceOp.MIN, group=groups.start)
        self.pool = Pool(self.runner.token_to_kv_pool, scheduler.token_to_kv_pool_allocator, kv_heads, int(tokens))
        self.rows = FusedRows(self.base.tp)
        shared = {"backend": BREAKABLE, "sharing": settings.ranks} if settings.one_device else {}
        self.runtimes = Runtimes(self.runner, settings.graph_memory_bytes, **shared)
        self._build_sizes()
        draw.warm_up(self.runner.sampler, self.runner.device, self.runner.model_config.vocab_size)
        (settings.path / f"graphs.{self.rank}").write_text(json.dumps(self.runtimes.memory_bytes), encoding="utf-8")
        self._seed()
        self.idle_sleeper = scheduler.idle_sleeper
        self.detokenizer = scheduler.ipc_channels.send_to_detokenizer.socket
        dist.barrier(groups.start)
        groups.started(settings.deadline_s)
        board.show_switch({}, self.base.tp, 0)

    def _build_sizes(self) -> None:
        """Model, attention backends and graphs of every wider size; on all ranks at once, since graphs communicate."""
        base_model = self.runner.model
        for tp in reversed(self.settings.tp_sizes[1:]):  # the widest first: narrower ones fit into its logits buffer
            wide = Layout(self.settings.ranks, tp)
            model = build_model(self.runner, self.groups.topology[tp])
            first_heads = tuple(layout.kv_heads(self.rank, self.pool.kv_heads).start for layout in (self.base, wide))
            bind(base_model, model, Place.of(self.base, wide, self.rank), first_heads, self.rows, tp)
            check_bound(base_model, model)
            self._point(wide)
            self.runtimes.add(tp, model)
        self._point(self.base)
        self.pool.resize(len(self.base.kv_heads(self.rank, self.pool.kv_heads)))
        self._tell_capacity()
        self.runtimes.use(self.base.tp)

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def is_leader(self) -> bool:
        return self.layout.tp_rank(self.rank) == 0

    def switch(self, order: Order) -> bool:
        """Change to ``order.tp``; the record goes to the board. True if done (or already there), False if undone.

        Raises SwitchError if the engine cannot go on.
        """
        record = self._record = Record(order.epoch, self.layout.tp, order.tp, order.kv)
        ranks = Transaction(record, self.settings, self.board, self.rank, self.groups)
        old, agreed = self.layout, False
        stop, handover = Stop(self.scheduler, self.runtimes.device), None
        try:
            self._agree(ranks.shared("agree", lambda: (order, self.layout.tp, self.epoch)))
            agreed = True
            new = Layout(self.settings.ranks, order.tp)
            if old != new or order.rebalance:
                handover = Handover(self.scheduler, self.settings, self.pool, self.rank, (old, new), record)
                locations = ranks.phase("quiesce", stop.now)
                rows = ranks.shared("collect", lambda: handover.collect(locations))
                ranks.phase("move", lambda: handover.prepare(rows, order))
                ranks.phase("exchange", lambda: handover.exchange(self.groups.world.device_group))
                ranks.last_phase("rebind", lambda: self._rebind(new))
                ranks.last_phase("resume", lambda: (handover.resume(), stop.go_on()))
        except SwitchAborted as error:
            record.error = str(error)
            log.error("PAT: switch %d from tp %d to tp %d undone: %s", order.epoch, old.tp, order.tp, error)
            if agreed:  # on some rank requests may have been stopped
                self._roll_back(old, stop)
        if handover is not None:
            handover.close()
        self.epoch = order.epoch
        self.board.show_switch(asdict(record), self.layout.tp, order.epoch)
        return record.error is None

    def _agree(self, told: list[tuple[Order, int, int]]) -> None:
        """Whether all ranks were asked the same and are in the same state; every rank comes to the same answer."""
        order, _, epoch = told[0]
        if len(set(told)) > 1:
            raise SwitchAborted(f"ranks disagree on the order, the present tp or the last switch: {told}")
        if order.tp not in self.settings.tp_sizes:
            raise SwitchAborted(f"tp {order.tp} is not one of this engine's sizes {self.settings.tp_sizes}")
        if order.epoch != epoch + 1:
            raise SwitchAborted(f"switch {order.epoch} does not follow switch {epoch}")

    def _point(self, new: Layout) -> None:
        """Let SGLang see the groups, the pool and the order of the weights' rows of ``new``."""
        self.groups.apply(new.tp)
        self.pool.retype(len(new.kv_heads(self.rank, self.pool.kv_heads)))
        self.rows.arrange(new.tp)
        self.runtimes.device.synchronize()  # the next step may run in another stream

    def _rebind(self, new: Layout) -> None:
        """Point SGLang at the new layout: context, groups, model, pool, sockets."""
        scheduler, runner = self.scheduler, self.runner
        self._point(new)
        self.runtimes.use(new.tp)
        group = self.groups.tp_group(new.tp)
        runner.sampler.tp_sync_group = group.device_group
        for name in ("tp_group", "attn_tp_group", "dp_tp_group"):
            setattr(scheduler, name, group)
        for name in ("tp_cpu_group", "attn_tp_cpu_group", "dp_tp_cpu_group"):
            setattr(scheduler, name, group.cpu_group)
        scheduler.tp_size = new.tp
        self._tell_capacity()
        self.layout = new
        # Only a leader streams tokens; a follower that slept would stall its leader's broadcasts.
        scheduler.ipc_channels.send_to_detokenizer.socket = self.detokenizer if self.is_leader else None
        scheduler.idle_sleeper = self.idle_sleeper if new == self.base else None
        self._seed()
        # What SGLang lets each replica learn or count for itself must be alike on ranks that are one replica now.
        scheduler.new_token_ratio_tracker.reset()
        scheduler._prefill_decode_interval_remaining = 0

    def _seed(self) -> None:
        """Requests without a seed draw one from the process's generator: alike within a replica, else different."""
        epoch = self._record.epoch if self._record else 0
        sg.set_random_seed(self.runner.server_args.random_seed + 7919 * epoch + self.layout.replica(self.rank))

    def _tell_capacity(self) -> None:
        """All that remembers how many tokens the pool holds, SGLang's own leak check among it."""
        scheduler = self.scheduler
        tokens = scheduler.max_total_num_tokens = self.pool.allocator.size
        for holder in CAPACITY_HOLDERS:
            object.__setattr__(getattr(scheduler, holder), "max_total_num_tokens", tokens)  # some are frozen

    def _roll_back(self, old: Layout, stop: Stop) -> None:
        """Go on in the old layout with the requests that this rank had; their KV is prefilled again.

        The ranks of a replica must be alike: one that failed before it had stopped stops now, as the others did.
        Raises SwitchError if it cannot.
        """
        scheduler = self.scheduler
        try:
            if not stop.done:
                stop.now()
            for req in scheduler.waiting_queue:
                adopt(scheduler, req)
            scheduler.flush_cache(empty_cache=False)
            self.pool.resize(len(old.kv_heads(self.rank, self.pool.kv_heads)))
            stop.go_on()
        except Exception as exception:
            raise SwitchError(f"rank {self.rank} could not undo a switch ({self._record.error})") from exception
