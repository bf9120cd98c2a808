"""pat.Engine: sglang.Engine whose tensor-parallel size changes while it generates."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time

import polars as pl

from pat.engine import sglang_api as sg
from pat.engine.board import Board
from pat.engine.controller import Controller
from pat.engine.cpu import environment
from pat.engine.errors import SwitchError, SwitchUndone
from pat.engine.plugin import SWITCH
from pat.engine.settings import VARIABLE, Settings
from pat.engine.shared import shared_folder
from pat.engine.switch import PHASES
from pat.layout import Layout
from pat.policy import Decision, Policy
from pat.seam import SeamError

environment.prepare()

# Options of SGLang that PAT cannot carry across a switch, and why.
REFUSED = {
    "tp_size": "PAT sets it: give ranks= and tp_sizes=",
    "dp_size": "PAT sets it: give ranks= and tp_sizes=",
    "pp_size": "a pipeline stage holds other layers on every rank, so a shard of one is no shard of another",
    "nnodes": "a switch moves KV inside one node; run one engine a node",
    "quantization": "packed quantised weights cannot be viewed as a narrower shard",
    "speculative_algorithm": "the draft model's state is not moved",
    "lora_paths": "adapters are sharded apart from the weights",
    "enable_lora": "adapters are sharded apart from the weights",
    "disable_radix_cache": "moved KV enters through the radix cache",
    "page_size": "KV moves by the token",
    "disaggregation_mode": "prefill and decode must share the ranks",
}


class Engine(sg.Engine):
    """``sglang.Engine`` on ``ranks`` ranks that starts as tp 1 replicas and can switch to any of ``tp_sizes``.

    policy: decides when to switch and to what; None: only ``switch`` does.
    max_new_tokens: the cap on response length that the policy reckons with, tokens.
    deadline_s: longest that a phase of a switch may take, seconds.
    Other arguments are sglang.Engine's. Raises ValueError for an option that cannot be supported, saying why.

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
        deadline_s: float = 60.0,
        **kwargs,
    ) -> None:
        sg.check()
        for option, reason in REFUSED.items():
            value = kwargs.get(option)
            if value is True or value not in (None, False, 1, "null"):
                raise ValueError(f"{option}={value!r} is not supported: {reason}")
        tp_sizes, ranks = tuple(sorted(set(tp_sizes))), ranks or max(tp_sizes)
        if tp_sizes[0] != 1:
            raise ValueError(f"tp_sizes={tp_sizes}: the smallest must be 1, which holds the weights that all use")
        for tp in tp_sizes:
            Layout(ranks, tp)  # raises if it does not divide
        shared = shared_folder("engine")
        self.settings = Settings(ranks, tp_sizes, f"tcp://127.0.0.1:{_free_port()}", str(shared), deadline_s)
        self.layout = Layout(ranks, 1)
        self.max_new_tokens = max_new_tokens
        self.switches: list[dict] = []
        self.boards = [Board.create(shared, rank) for rank in range(ranks)]
        self.switching = asyncio.Lock()
        self.controller = Controller(self, policy) if policy else None
        # The overlap scheduler runs a step ahead of what is known of each request; a switch needs a step boundary.
        fixed = {"dp_size": ranks, "tp_size": 1, "disable_overlap_schedule": True, "page_size": 1}
        arguments = {"random_seed": 0} | environment.server_args() | kwargs | fixed
        variables = {VARIABLE: self.settings.to_environment()}
        if not environment.has_accelerator():
            variables |= environment.thread_binding(ranks)
        saved = {key: os.environ.get(key) for key in variables}
        os.environ.update(variables)
        try:
            super().__init__(**arguments)
        except BaseException:
            shutil.rmtree(shared, ignore_errors=True)
            raise
        finally:
            for key, value in saved.items():
                os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)
        if not hasattr(self.tokenizer_manager, "rid_to_state"):
            raise SeamError(f"SGLang's tokenizer manager keeps no rid_to_state: install sglang=={sg.seam.written_for}")
        loaded = len(list(shared.glob("plugin.*")))
        if loaded < ranks:  # SGLang only logs a plugin that fails
            self.shutdown()
            raise RuntimeError(
                f"PAT's plugin ran in {loaded} of at least {ranks} SGLang processes: is the package installed "
                "(pip install -e .) in the environment that SGLang runs in? See SGLang's log for the reason."
            )

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

    async def begin_iteration(self) -> None:
        """A generation stage starts: take the layout that the policy wants before the first request."""
        if self.controller:
            self.controller.begin()
            decision = self.controller.policy.decide(self.controller.state(self.live_rows()))
            if decision.tp != self.layout.tp:
                await self.async_switch(decision.tp)
            self.controller.start()

    async def end_iteration(self) -> None:
        """A generation stage has ended: no more decisions, back to the base layout, ready for new weights."""
        if self.controller:
            await self.controller.stop()
        await self.async_switch(1)

    # --- state ---------------------------------------------------------------------------------------------
    def progress(self) -> tuple[int, int]:
        """(live requests, steps so far) of the group."""
        leaders = [self.boards[rank] for rank in self.layout.leaders]
        return sum(board.live_count for board in leaders), sum(board.step_count for board in leaders)

    @property
    def in_flight(self) -> int:
        """Requests without an answer, those included that no rank has seen yet: a rank reads between steps only."""
        return len(self.tokenizer_manager.rid_to_state)

    def live_rows(self) -> list[list[tuple[int, int, int]]]:
        """Unfinished requests of each replica: (key of the request id, prompt tokens, generated tokens)."""
        return [self.boards[leader].read_live() for leader in self.layout.leaders]

    def steps(self, since: list[int] | None = None) -> pl.DataFrame:
        """Steps of the leaders, each with its rank; ``since``: step number a rank, as ``step_marks`` gave it."""
        frames = [
            board.read_steps(since[rank] if since else 0).with_columns(rank=pl.lit(rank))
            for rank, board in enumerate(self.boards)
        ]
        return pl.concat(frames).filter(pl.col("rank") % pl.col("tp") == 0).sort("start")

    def step_marks(self) -> list[int]:
        return [board.step_count for board in self.boards]

    # --- switching -----------------------------------------------------------------------------------------
    def switch(self, tp: int, kv: str = "migrate") -> dict:
        """Change the tensor-parallel size now; see ``async_switch``."""
        return self.loop.run_until_complete(self.async_switch(tp, kv))

    async def async_switch(
        self,
        tp: int,
        kv: str | None = "migrate",
        *,
        decision: Decision | None = None,
        rows: list[list[tuple[int, int, int]]] | None = None,
    ) -> dict:
        """Change to ``tp``; unfinished requests go on. Idempotent: at ``tp`` already, nothing happens.

        kv: "migrate" or "recompute" the KV of unfinished requests. Returns the record of the switch (seconds a
        phase, tokens, bytes), {} if nothing had to be done. Raises SwitchUndone if it was undone, SwitchError if
        the ranks did not answer within the deadline.
        """
        if tp not in self.settings.tp_sizes:
            raise ValueError(f"tp {tp} is not one of this engine's tp_sizes {self.settings.tp_sizes}")
        async with self.switching:
            old = self.layout
            if tp == old.tp:
                return {}
            epoch = 1 + self.boards[0].epoch
            message = sg.SetInternalStateReq(
                server_args={
                    SWITCH: tp,
                    "pat_epoch": epoch,
                    "pat_migrate": int((kv or "migrate") == "migrate"),
                }
            )
            asked = time.monotonic()
            deadline_s = self.settings.switch_deadline_s
            try:
                done = await asyncio.wait_for(self.tokenizer_manager.set_internal_state(message), deadline_s)
            except TimeoutError:
                silent = [rank for rank, board in enumerate(self.boards) if board.epoch < epoch]
                raise SwitchError(
                    f"switch to tp {tp}: ranks {silent} did not answer within {deadline_s:.0f} s; "
                    "the engine cannot go on"
                ) from None
            if not all(done):
                raise SwitchUndone(f"switch to tp {tp} was undone: {self.boards[0].read_switch()['error']}")
            self.layout = Layout(self.settings.ranks, tp)
            record = self._record(asked, decision, rows)
            self.switches.append(record)
            return record

    def _record(self, asked: float, decision: Decision | None, rows: list | None) -> dict:
        """The ranks' records as one. A phase ends when the slowest rank ends it; the first begins at ``asked``."""
        ranks = [board.read_switch() for board in self.boards]
        ends = [asked, *(max(r["ends"][name] for r in ranks) for name in PHASES)]
        phases = {f"{name}_s": b - a for name, a, b in zip(PHASES, ends, ends[1:], strict=False)}
        return {
            "tp_from": ranks[0]["tp_from"],
            "tp_to": ranks[0]["tp_to"],
            "kv": ranks[0]["kv"],
            "asked": asked,  # time.monotonic(), as is end
            "end": ends[-1],
            "unfinished": ranks[0]["unfinished"],
            "kv_tokens_moved": ranks[0]["kv_tokens_moved"],
            "kv_tokens_recomputed": ranks[0]["kv_tokens_recomputed"],
            "bytes_moved": sum(r["bytes_moved"] for r in ranks),
            "exchange_s": max(r["exchange_s"] for r in ranks),
            **phases,
            "total_s": ends[-1] - asked,
            "predicted_saving_s": decision.saving_s if decision else None,
            "predicted_cost_s": decision.cost_s if decision else None,
            "live": rows,  # what the decision was made on: live_rows() of the old layout
        }

    # --- weights -------------------------------------------------------------------------------------------
    async def update_weights(self, path: str) -> None:
        """Load new weights (a checkpoint folder) into the base layout. Every other size is a view of them.

        Raises RuntimeError in a wide layout, with live requests, or if SGLang refuses the weights.
        """
        if self.layout.tp != 1:
            raise RuntimeError(f"weights are updated at tp 1, not at tp {self.layout.tp}: call end_iteration first")
        for _ in range(100):  # a rank shows that it has nothing left just after its last answer has arrived
            if not self.progress()[0]:
                break
            await asyncio.sleep(0.01)
        else:
            raise RuntimeError(f"weights cannot change under {self.progress()[0]} unfinished requests")
        update = self.tokenizer_manager.update_weights_from_disk(sg.UpdateWeightFromDiskReqInput(model_path=str(path)))
        result = await asyncio.wait_for(update, self.settings.switch_deadline_s)
        if not result[0]:
            raise RuntimeError(f"SGLang refused the weights in {path}: {result[1]}")

    def shutdown(self) -> None:
        try:
            super().shutdown()
        finally:
            shutil.rmtree(self.settings.path, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
