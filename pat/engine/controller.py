"""The one place that decides: reads the state of all ranks, asks the policy, has the engine switch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING

import numpy as np

from pat.engine.errors import SwitchUndone
from pat.policy import DECISION_SHARE, Decision, Live, Policy, RolloutState

if TYPE_CHECKING:
    from pat.engine.api import Engine

log = logging.getLogger(__name__)

POLL_S = 0.02  # seconds between looks at the boards; a look costs microseconds
STEPS_BETWEEN_DECISIONS = 32  # decode steps after which the policy is asked even if nothing finished


class Controller:
    """Runs beside the generation in the engine's event loop.

    Decides when requests have arrived and no more do, when one finished, and every few steps, but not more often than
    leaves decisions at DECISION_SHARE of the time.
    """

    def __init__(self, engine: Engine, policy: Policy) -> None:
        self.engine, self.policy = engine, policy
        self.thinking = asyncio.Lock()  # held while the policy is asked
        self.task: asyncio.Task | None = None
        self.begin()

    def begin(self, requests: int | None = None) -> None:
        """A new generation stage, of so many requests if that is known."""
        self._awaited = self.engine.sent + requests if requests else 0
        self.decision_s: list[float] = []  # what each decision took, seconds
        self._reset_limits()

    def _reset_limits(self) -> None:
        """Nothing is left to generate: what comes next may be switched as often, and a switch be tried again."""
        self.switches, self.switch_s, self.started = 0, 0.0, None
        self._decided_at: tuple[int, int] = (0, 0)
        self._last_live = 0
        self._given_up = False  # after a switch that had to be undone
        self._rests_until = 0.0  # time.perf_counter()
        self._seen = self.engine.step_marks()  # steps that the policy knows of

    def start(self) -> None:
        """Start deciding; raises what ended an earlier run of this controller."""
        if self.task is not None and self.task.done() and not self.task.cancelled():
            self.task.result()
        if self.task is None or self.task.done():
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:  # called by the blocking generate, just before it runs the engine's loop
                loop = self.engine.loop
            self.task = loop.create_task(self._run())

    async def stop(self) -> None:
        """Stop deciding, after a switch in progress has ended; raises what ended the run early."""
        if self.task is None:
            return
        task, self.task = self.task, None
        if not task.done():
            async with self.thinking, self.engine.switching:
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def alongside(self, generation: Awaitable):
        """The result of ``generation``; raises at once what ends this controller, if that comes first.

        After a switch that did not end no request would ever be answered.
        """
        work, task = asyncio.ensure_future(generation), self.task
        try:
            await asyncio.wait({work, task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            work.cancel()
            raise
        if not work.done() and not task.cancelled():
            work.cancel()
            task.result()
        return await work

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if self._due():
                await self._decide()

    def _due(self) -> bool:
        """Whether something happened that the policy should see."""
        live, steps = self.engine.progress()
        arriving, self._last_live = live > self._last_live, live
        if not live:
            self._reset_limits()
            return False
        if arriving or live < self.engine.in_flight or self.engine.sent < self._awaited:  # a batch is still coming in
            return False
        if self._given_up:
            return False
        if time.perf_counter() < self._rests_until:
            return False
        if self.engine.paused:  # nothing is generated, and its user is about to do something
            return False
        decided_live, decided_steps = self._decided_at
        if steps < decided_steps:  # a wider layout has fewer leaders, over whom steps are counted
            decided_steps = steps
            self._decided_at = (decided_live, steps)
        if live == decided_live and steps - decided_steps < STEPS_BETWEEN_DECISIONS:
            return False
        self._decided_at = (live, steps)
        return True

    async def _decide(self) -> None:
        self.started = self.started or time.monotonic()
        rows = self.engine.live_rows()
        state = self.state(rows)
        if not state.live:
            return
        before, sent = time.perf_counter(), self.engine.sent
        seen, self._seen = self._seen, self.engine.step_marks()
        decision, worked_s = await self.ask(state, self.engine.steady_steps(seen))
        decided = time.perf_counter()
        self.decision_s.append(decided - before)
        # By its own time: who once waits for a core for seconds would not be asked again in this generation.
        self._rests_until = decided + worked_s / DECISION_SHARE
        # While the policy thought, the event loop may have stood still and these requests ended, or others come.
        if decision.changes(state.tp) and self.engine.in_flight and self.engine.sent == sent:
            await self._switch(decision, rows)

    async def ask(self, state: RolloutState, steps: np.ndarray | None = None) -> tuple[Decision, float]:
        """(what the policy decides on ``state``, seconds of a core that it took).

        steps: decode steps since it was last asked, as ``Engine.steady_steps``. In a thread: answers are read in the
        event loop meanwhile, which belongs to the engine's user.
        """

        def think() -> tuple[Decision, float]:
            begin = time.thread_time()
            if steps is not None:
                self.policy.observe_steps(state.tp, steps["batch"], steps["context"], steps["seconds"])
            return self.policy.decide(state), time.thread_time() - begin

        async with self.thinking:
            return await asyncio.to_thread(think)

    async def _switch(self, decision: Decision, rows: list[list[tuple[int, int, int]]]) -> None:
        try:
            if decision.rebalance:
                record = await self.engine.async_rebalance(decision.kv, decision=decision, rows=rows)
            else:
                record = await self.engine.async_switch(decision.tp, kv=decision.kv, decision=decision, rows=rows)
        except SwitchUndone as undone:
            log.warning("PAT: %s; staying at tp %d until this generation ends", undone, self.engine.layout.tp)
            self._given_up = True
            return
        self.switches += record["tp_from"] != record["tp_to"]  # else a rebalance, or somebody has switched meanwhile
        self.switch_s += record["total_s"]

    def state(self, rows: list[list[tuple[int, int, int]]]) -> RolloutState:
        """What the policy sees, from the boards' rows of each replica."""
        elapsed = time.monotonic() - self.started if self.started else 0.0
        return RolloutState(
            tp=self.engine.layout.tp,
            replicas=tuple(tuple(Live(prompt, generated) for _, prompt, generated in replica) for replica in rows),
            cap=self.engine.max_new_tokens,
            switches=self.switches,
            switch_s=self.switch_s,
            elapsed_s=elapsed,
        )
