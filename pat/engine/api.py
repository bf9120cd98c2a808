"""pat.Engine: sglang.Engine whose tensor-parallel size changes while it generates."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import polars as pl

from pat.engine import checkpoint, one_device, records, refusals, trace, watch
from pat.engine import sglang_api as sg
from pat.engine.board import Board, board_bytes
from pat.engine.controller import Controller
from pat.engine.cpu import environment
from pat.engine.cpu.allreduce import mailbox_bytes
from pat.engine.device import visible_devices
from pat.engine.errors import EngineDead
from pat.engine.settings import VARIABLE, KvCosts, Settings
from pat.engine.shared import shared_folder, start_resource_tracker
from pat.engine.switching import Switching
from pat.engine.unsupported import Unsupported
from pat.engine.weight_updates import WeightUpdates
from pat.layout import Layout
from pat.model import ModelSpec
from pat.policy import Policy

environment.prepare()


class Engine(Unsupported, WeightUpdates, Switching, sg.Engine):
    """``sglang.Engine`` on ``ranks`` ranks that starts at the smallest of ``tp_sizes`` and can switch to any of them.

    tp_sizes: each must divide the next and the ranks; at the smallest the weights must fit a rank's memory.
    ranks: by default the largest size.
    policy: decides when to switch and to what; None: only ``switch`` does.
    max_new_tokens: the cap on response length that the policy reckons with, tokens.
    kv_costs: what a request's KV costs at a switch with kv="auto"; None: a guess from the model's shape.
    deadline_s: longest that a phase of a switch may take, seconds.
    graph_memory_bytes: device memory that the graphs of one size may take; None: 5 % of the device's.
    one_device: put all ranks on the first visible device. Slow; for tests on a machine with one GPU.
    Other arguments are sglang.Engine's. Raises ValueError for an option or a model that cannot be supported, saying
    why, before anything starts; EngineDead if a process ends while they start. From then on every call that waits
    for the engine raises EngineDead when one of its processes ends.

        engine = pat.Engine(model_path="Qwen/Qwen3-0.6B", tp_sizes=(1, 2))
        engine.generate("The answer is", {"max_new_tokens": 64})
        engine.switch(2)
    """

    def __init__(
        self,
        *,
        tp_sizes: tuple[int, ...] = (1, 2),
        ranks: int | None = None,
        policy: Policy | None = None,
        max_new_tokens: int = 4096,
        kv_costs: KvCosts | None = None,
        deadline_s: float = 60.0,
        graph_memory_bytes: int | None = None,
        one_device: bool = False,
        **kwargs,
    ) -> None:
        sg.check()
        refusals.check_options(kwargs)
        tp_sizes, ranks = refusals.check_sizes(tp_sizes, ranks)
        config = refusals.read_config(kwargs["model_path"], kwargs)
        refusals.check_model(config, tp_sizes, ranks)
        self.parameters = checkpoint.parameters_of(config)
        checkpoint.check_complete(self.parameters, kwargs)
        self.kv_costs = kv_costs or _guess_costs(config, kwargs.get("dtype"))
        start_resource_tracker()
        shared = shared_folder("engine", _shared_bytes(ranks, tp_sizes, one_device))
        self.settings = Settings(ranks, tp_sizes, str(shared), deadline_s, graph_memory_bytes, one_device)
        self.layout = Layout(ranks, self.settings.base)
        self.max_new_tokens = max_new_tokens
        self.switches: list[dict] = []
        self.boards = [Board.create(shared, rank) for rank in range(ranks)]
        self.switching = asyncio.Lock()
        self.controller = Controller(self, policy) if policy else None
        self.watch = watch.Watch(shared, self.boards)
        self.init_tokenizer_manager_func = self._init_tokenizer_manager
        fixed = {"dp_size": ranks // self.settings.base, "tp_size": self.settings.base, "page_size": 1}
        fixed |= environment.kernels()
        try:
            with self._variables():
                super().__init__(**{"random_seed": 0} | self._server_args() | kwargs | fixed)
            self._take_over_processes()
        except BaseException as error:
            self.watch.settle()
            self._clean_up()
            atexit.unregister(self.shutdown)  # SGLang's; at exit it would end what has been started since
            if self.watch.death is not None and isinstance(error, Exception):
                raise EngineDead(str(self.watch.death)) from error
            raise

    def _server_args(self) -> dict:
        """PAT's own defaults for sglang.Engine."""
        defaults = environment.server_args()
        if self.settings.one_device:
            defaults |= one_device.server_args(self.settings.base, environment.has_accelerator())
        return defaults

    @contextlib.contextmanager
    def _variables(self) -> Iterator[None]:
        """The environment that SGLang's processes start with."""
        variables = {VARIABLE: self.settings.to_environment()}
        variables["TQDM_DELAY"] = os.environ.get("TQDM_DELAY", "2")  # seconds; else a bar for every bucket of weights
        if environment.has_accelerator():
            variables |= visible_devices(self.layout, self.settings.tp_sizes, self.settings.one_device)
        else:
            variables |= environment.thread_binding(self.settings.ranks)
        if self.settings.one_device:
            variables |= one_device.VARIABLES
        saved = {key: os.environ.get(key) for key in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for key, value in saved.items():
                os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)

    @classmethod
    def _launch_scheduler_processes(cls, server_args, port_args, run_scheduler_process_func, **kwargs):
        watch.take_sigquit()  # SGLang has just set a handler that ends the user's process, too
        if Settings.from_environment().one_device:
            run_scheduler_process_func = one_device.run_scheduler
        return super()._launch_scheduler_processes(server_args, port_args, run_scheduler_process_func, **kwargs)

    def _init_tokenizer_manager(self, server_args, port_args):
        from pat.engine.tokenizer import TokenizerManager

        ours = partial(
            TokenizerManager,
            watch=self.watch,
            switching=self.switching,
            at_base=self._at_base,
            deadline_s=self.settings.deadline_s,
            parameters=self.parameters,
        )
        managers = sg.init_tokenizer_manager(server_args, port_args, ours)
        # SGLang drops it if the start fails hereafter; collected, its ZeroMQ context would wait for its sockets for
        # ever. The engine itself is kept by atexit.
        self.tokenizer_manager = managers[0]
        return managers

    def _take_over_processes(self) -> None:
        """Watch SGLang's processes in its watchdog's place. Raises RuntimeError if PAT is not in all of them."""
        sg.check_tokenizer_manager(self.tokenizer_manager)
        watchdog = self.tokenizer_manager._subprocess_watchdog
        watchdog.stop()
        names = [f"the {name}" if "detokenizer" in name else watch.CONTROLLER for name in watchdog._names]
        self.watch.add(watchdog._processes, names)
        needed = [(f"rank {rank}", board.pid) for rank, board in enumerate(self.boards)]
        needed += [(n, p.pid) for n, p in zip(names, watchdog._processes, strict=True) if "detokenizer" in n]
        deadline = time.monotonic() + self.settings.deadline_s  # the detokenizer is not waited for otherwise
        while missing := [n for n, pid in needed if not (self.settings.path / f"plugin.{pid}").exists()]:
            self.watch.check()
            if time.monotonic() > deadline:  # SGLang only logs a plugin that fails
                raise RuntimeError(
                    f"PAT's plugin did not run in {', '.join(missing)}: is the package installed (pip install -e .) in "
                    "the environment that SGLang runs in? See SGLang's log for the reason."
                )
            time.sleep(0.01)

    # --- generation ----------------------------------------------------------------------------------------
    def generate(self, *args, **kwargs):
        if self.controller:
            self.controller.start()
        return super().generate(*args, **kwargs)

    async def async_generate(self, *args, **kwargs):
        if self.controller:
            self.controller.start()
            return await self.controller.alongside(super().async_generate(*args, **kwargs))
        return await super().async_generate(*args, **kwargs)

    async def begin_iteration(self, requests: int | None = None) -> None:
        """A generation stage starts: take the layout that the policy wants before the first request.

        requests: as many will come, if that is known; the policy is not asked again before the last one.
        """
        if self.controller:
            self.controller.begin(requests)
            decision, _ = await self.controller.ask(self.controller.state(self.live_rows()))
            if decision.tp != self.layout.tp:
                await self.async_switch(decision.tp)
            self.controller.start()

    async def end_iteration(self) -> None:
        """A generation stage has ended: no more decisions, back to the base layout, ready for new weights."""
        if self.controller:
            await self.controller.stop()
        await self.async_switch(self.settings.base)

    # --- state ---------------------------------------------------------------------------------------------
    def progress(self) -> tuple[int, int]:
        """(live requests, steps so far) of the group."""
        leaders = [self.boards[rank] for rank in self.layout.leaders]
        live = sum(board.live_count for board in leaders) if self.in_flight else 0  # see live_rows
        return live, sum(board.step_count for board in leaders)

    @property
    def in_flight(self) -> int:
        """Requests without an answer, those included that no rank has seen yet: a rank reads between steps only."""
        return len(self.tokenizer_manager.rid_to_state)

    @property
    def sent(self) -> int:
        """Requests that have been sent to the ranks since the engine started."""
        return self.tokenizer_manager.sent

    @property
    def paused(self) -> bool:
        """Whether generation is paused (``tokenizer_manager.pause_generation``)."""
        return self.tokenizer_manager.is_pause

    def live_rows(self) -> records.Rows:
        """Unfinished requests of each replica: (key of the request id, prompt tokens, generated tokens).

        A rank shows that a request has ended just after its answer has left: without requests in flight none is live.
        """
        if not self.in_flight:
            return [[] for _ in self.layout.leaders]
        return [self.boards[leader].read_live() for leader in self.layout.leaders]

    def steps(self, since: list[int] | None = None) -> pl.DataFrame:
        """Steps of the leaders, each with its rank; ``since``: step number a rank, as ``step_marks`` gave it."""
        frames = [
            board.read_steps(since[rank] if since else 0).with_columns(rank=pl.lit(rank))
            for rank, board in enumerate(self.boards)
        ]
        leads = pl.col("rank") < self.settings.ranks // pl.col("tp")  # of the layout at that step
        return pl.concat(frames).filter(leads).sort("start")

    def steady_steps(self, since: list[int]) -> np.ndarray:
        """Decode steps since ``step_marks`` gave ``since`` that the latency model is about, of the present leaders."""
        rows = [trace.steady(self.boards[rank].step_rows(since[rank])) for rank in self.layout.leaders]
        rows = np.concatenate(rows)
        return rows[rows["tp"] == self.layout.tp]

    def graph_memory(self) -> dict[int, int]:
        """{tp: device bytes that graphs and attention backends of this size took at start}, of the rank with most."""
        ranks = [json.loads(file.read_text(encoding="utf-8")) for file in self.settings.path.glob("graphs.*")]
        return {tp: max(rank[str(tp)] for rank in ranks) for tp in self.settings.tp_sizes}

    def step_marks(self) -> list[int]:
        return [board.step_count for board in self.boards]

    def get_weights_by_name(self, name: str, truncate_size: int = 100):
        """SGLang's; RuntimeError in a wide layout, where a fused layer's parts are not where SGLang looks for them."""
        if self.layout.tp != self.settings.base:
            raise RuntimeError(f"weights are read at tp {self.settings.base}: call switch({self.settings.base}) first")
        return super().get_weights_by_name(name, truncate_size)

    def shutdown(self) -> None:
        """End the engine's processes and, unlike SGLang, no other child of this process; again: nothing."""
        self.watch.close()
        try:
            sg.shutdown(self, self.watch.end_processes)
        finally:
            left = self._clean_up()
        if left:
            raise RuntimeError(
                f"processes of the engine live on, {watch.END_S:g} s after they were killed: pids {left}"
            )

    def _clean_up(self) -> list[int]:
        """Processes that could not be ended, by pid."""
        self.watch.close()
        left = self.watch.end_processes()
        shutil.rmtree(self.settings.path, ignore_errors=True)
        return left


def _guess_costs(config: dict, dtype: str | None) -> KvCosts:
    given = dtype if dtype not in (None, "auto") else config.get("dtype") or config.get("torch_dtype")
    itemsize = 4 if given in ("float", "float32") else 2
    return KvCosts.guess(ModelSpec.from_hf(config), itemsize, environment.has_accelerator())


def _shared_bytes(ranks: int, tp_sizes: tuple[int, ...], one_device: bool) -> int:
    """What an engine's folder takes from its start on: a board a rank, and where ranks meet on the host mailboxes."""
    mailboxes = 0
    if one_device or not environment.has_accelerator():
        sizes = {*tp_sizes, ranks} - {1}
        mailboxes = sum(ranks // tp * mailbox_bytes(tp) for tp in sizes)
    return ranks * board_bytes() + mailboxes
