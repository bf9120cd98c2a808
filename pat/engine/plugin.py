"""PAT as a plugin of SGLang 0.5.23 (entry point ``sglang.srt.plugins``): the hooks, and what they do.

Loaded by SGLang in the engine, the data-parallel controller, the detokenizer and every scheduler process. It does
nothing in an engine that was not started by ``pat.Engine``. The names that it touches are in ``sglang_api``.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from functools import partial

from pat.engine import draw, endings, groups, loading, one_device, penalties, sampling
from pat.engine import sglang_api as sg
from pat.engine.board import Board
from pat.engine.cpu import environment, processes, stand_ins
from pat.engine.cpu.allreduce import SharedMemoryCollectives, supported
from pat.engine.live import LiveList
from pat.engine.ordering import Counts, InOrder
from pat.engine.settings import KV_CHOICES, KvCosts, Settings
from pat.layout import Layout

# Key of a SetInternalStateReq (its values are numbers) that is a switch; see ``order_of`` for the others.
SWITCH = "pat_tp"


def register() -> None:
    """Register all hooks; called by SGLang once a process, before anything is built.

    The detokenizer, known by what it has not imported, gets its own only: it starts in a second, and would take ten
    with the scheduler.
    """
    settings = Settings.from_environment()
    if settings is None:
        return
    if "sglang.srt.managers.detokenizer_manager" in sys.modules:
        hook_detokenizer(settings)
    if "sglang.srt.managers.scheduler" in sys.modules:
        hook_scheduler(settings)
    (settings.path / f"plugin.{os.getpid()}").touch()  # SGLang only logs a plugin that fails: show that this one ran


def hook_detokenizer(settings: Settings) -> None:
    loop = f"{sg.path('DetokenizerManager')}.event_loop"
    sg.HookRegistry.register(loop, partial(detokenizer_event_loop, settings), sg.HookType.REPLACE)


def hook_scheduler(settings: Settings) -> None:
    """In the data-parallel controller and the schedulers, which it starts."""
    on_cpu = not environment.has_accelerator()
    if on_cpu:
        stand_ins.add()
    hook, kind = sg.HookRegistry.register, sg.HookType
    hook(sg.path("Scheduler"), scheduler_class(settings), kind.REPLACE)
    hosted = settings.one_device or on_cpu
    mail = SharedMemoryCollectives(settings.path, settings.deadline_s) if hosted and supported() else None
    hook(sg.path("init_parallel_groups"), _build_groups(settings, mail), kind.AROUND)
    controller = sg.path("DataParallelController")
    hook(f"{controller}.send_control_message", RouteToLeaders(settings), kind.AROUND)
    hook(
        f"{controller}.init_dispatcher",
        lambda _, self: endings.tell_exit_codes(settings.path, self.scheduler_procs),
        kind.AFTER,
    )
    hook(f"{controller}.event_loop", endings.with_last_words(settings.path), kind.AROUND)
    hook(f"{sg.path('WeightUpdater')}.update_weights_from_disk", partial(loading.from_disk, settings), kind.AROUND)
    hook(f"{sg.path('SamplingBatchInfo')}.from_schedule_batch", sampling.from_schedule_batch, kind.AROUND)
    hook(sg.path("Sampler"), draw.sampler_class(), kind.REPLACE)
    hook(sg.path("apply_scaling_penalties"), draw.scale, kind.REPLACE)
    hook(f"{sg.path('SamplingBatchInfo')}.copy_for_forward", penalties.copy_for_forward, kind.AROUND)
    hook(f"{sg.path('ScheduleBatch')}.cumulate_penalty_output_tokens", penalties.count_known, kind.REPLACE)
    hook(f"{sg.path('ModelRunner')}.sample", penalties.sample, kind.AROUND)
    if on_cpu:
        hook(sg.path("set_envs_and_config"), lambda result, *_, **__: processes.use(), kind.AFTER)
        hook(f"{controller}.event_loop", controller_event_loop, kind.REPLACE)
    coordinator = sg.path("GroupCoordinator")
    if settings.one_device:
        host = one_device.HostCollectives(mail, sg.eager_on_graph)
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor"):
            hook(f"{coordinator}.{name}", getattr(host, name), kind.AROUND)
        hook(sg.path("init_model_parallel_group"), one_device.without_nccl, kind.AROUND)
    elif on_cpu and mail:
        hook(f"{coordinator}.all_reduce", mail.all_reduce, kind.AROUND)
        hook(f"{coordinator}.all_gather", mail.all_gather, kind.AROUND)


def _build_groups(settings: Settings, mail: SharedMemoryCollectives | None):
    def around(original, *, backend, server_args, gpu_id, **_) -> None:
        backend = "gloo" if settings.one_device else backend
        groups.build(settings, backend=backend, server_args=server_args, gpu_id=gpu_id)
        if mail:
            mail.connect(groups.current().all())

    return around


def scheduler_class(settings: Settings) -> type:
    """SGLang's scheduler with a switcher, a board, and answers from leaders only."""
    from pat.engine import resume
    from pat.engine.switch import Switcher

    class PatScheduler(sg.Scheduler):
        def __init__(self, *args, **kwargs) -> None:
            rank = groups.rank_of(settings)
            self.board = Board.open(settings.path, rank)
            self.board.show_pid(os.getpid())  # first: who watches must be able to name a rank that ends while it starts
            if not environment.has_accelerator():
                environment.pin_to_core(rank)
            with endings.last_words(settings.path):
                super().__init__(*args, **kwargs)
                self.switcher = Switcher(self, settings, groups.current(), self.board)
            self.live = LiveList(self.board)
            self._launches: deque[float] = deque()  # of steps whose result is not there yet: two with overlap
            self._busy_since: float | None = None

        def run_event_loop(self) -> None:
            with endings.last_words(settings.path):
                super().run_event_loop()

        def init_tp_model_worker(self) -> None:
            # SGLang broadcasts the seed assuming that global rank and tp rank are the same: give the seed instead.
            self.tp_worker = sg.TpModelWorker(
                server_args=self.server_args,
                gpu_id=sg.get_device().gpu_id,
                nccl_port=self.nccl_port,
                random_seed=sg.get_device().random_seed,
            )

        def set_internal_state(self, recv_req):
            values = recv_req.server_args
            if SWITCH not in values:
                return super().set_internal_state(recv_req)
            done = self.switcher.switch(order_of(values))
            self._busy_since = None
            self._show_live()  # of the new layout, before anybody can decide on it
            return sg.SetInternalStateReqOutput(updated=done)

        def send_abort_output(self, abort_req, req) -> None:
            if self.switcher.is_leader:  # one answer a request, not one a rank
                super().send_abort_output(abort_req, req)

        def run_batch(self, batch, *args, **kwargs):
            self._launches.append(time.monotonic())
            return super().run_batch(batch, *args, **kwargs)

        def process_batch_result(self, batch, result) -> None:
            decode = batch.forward_mode.is_decode()
            requests = len(batch.reqs)
            context = int(batch.seq_lens_cpu.sum())
            tokens = requests if decode else int(batch.extend_num_tokens or 0)
            with resume.hidden_states_once(batch):
                super().process_batch_result(batch, result)
            now, launched = time.monotonic(), self._launches.popleft()
            start = self._busy_since or launched
            self.board.show_step(
                start=start,
                seconds=now - start,
                decode=decode,
                tp=self.switcher.layout.tp,
                batch=requests,
                context=context,
                tokens=tokens,
            )
            self._busy_since = now
            self._show_live(batch)

        def _show_live(self, batch=None) -> None:
            if self.switcher.is_leader:  # nobody reads a follower's
                self.live.of(self, batch)

        def on_idle(self) -> None:
            self._busy_since = None
            self._show_live()  # SGLang may call it with requests waiting
            super().on_idle()

    return PatScheduler


def order_of(values: dict):
    """The order that travels as numbers in a SetInternalStateReq; ``Engine.async_switch`` writes it."""
    from pat.engine.handover import Order

    kv = KV_CHOICES[int(values["pat_kv"])]
    costs = KvCosts.from_message(values) if kv == "auto" else None
    return Order(int(values[SWITCH]), int(values["pat_epoch"]), kv, costs, bool(values["pat_rebalance"]))


class RouteToLeaders:
    """In the data-parallel controller: work and control go to leaders; followers get them by broadcast.

    Messages are handled one by one here, so this is where a switch is a point in time for all of them: what came
    before it has been sent to the old leaders, and nothing that comes after it is sent before all ranks are through.
    A rank reads its socket empty at once; sent earlier, a request would be read under the old layout.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, original, controller, message):
        original(controller, message)
        values = getattr(message, "server_args", None)
        if isinstance(values, dict) and SWITCH in values:
            tp = self._wait_for_ranks(int(values["pat_epoch"]))
            # The leader of a wide replica is the leader of one of the base size, whose number is its rank.
            leaders = Layout(self.settings.ranks, tp).leaders
            controller.status = [replica in leaders for replica in range(len(controller.status))]
            controller._refresh_active_workers()
            controller.round_robin_counter = 0

    def _wait_for_ranks(self, epoch: int) -> int:
        """The tp that the ranks have after switch ``epoch``, which may have been undone.

        Raises TimeoutError naming the ranks that are not through; SGLang then ends the engine.
        """
        boards = [Board.open(self.settings.path, rank) for rank in range(self.settings.ranks)]
        deadline = time.monotonic() + self.settings.switch_deadline_s
        while time.monotonic() < deadline:
            missing = [rank for rank, board in enumerate(boards) if board.epoch < epoch]
            if not missing:
                return boards[0].tp
            time.sleep(1e-3)
        raise TimeoutError(
            f"ranks {missing} were not through switch {epoch} in {self.settings.switch_deadline_s:.0f} s"
        )


def controller_event_loop(controller) -> None:
    """SGLang's loop polls without waiting and takes a core; this one waits for a message."""
    import zmq

    poller = zmq.Poller()
    poller.register(controller.recv_from_tokenizer, zmq.POLLIN)
    while True:
        controller.soft_watchdog.feed()
        if poller.poll(200):
            controller._request_dispatcher(sg.sock_recv(controller.recv_from_tokenizer))


def detokenizer_event_loop(settings: Settings, detokenizer) -> None:
    """SGLang's loop, with the tokens of a request in their order whichever rank they came from."""
    import zmq

    counts = Counts()
    in_order = InOrder(counts, settings.deadline_s)
    poller = zmq.Poller()
    poller.register(detokenizer.recv_from_scheduler, zmq.POLLIN)
    with endings.last_words(settings.path):
        while True:
            detokenizer.soft_watchdog.feed()
            if poller.poll(1000):
                for message in in_order.ready(sg.sock_recv(detokenizer.recv_from_scheduler)):
                    output = detokenizer._request_dispatcher(message)
                    counts.note(message)
                    if output is not None:
                        sg.sock_send(detokenizer.send_to_tokenizer, output)
            in_order.check()
