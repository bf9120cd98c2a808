"""The part of pat.Engine that has the ranks change their layout: one switch at a time, each with its record."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from pat.engine import records
from pat.engine import sglang_api as sg
from pat.engine.errors import SwitchUndone
from pat.engine.plugin import SWITCH
from pat.engine.settings import KV_CHOICES
from pat.layout import Layout
from pat.policy import Decision


class Switching:
    """Part of ``Engine``: by hand, by the policy, or because new weights need the base layout."""

    def switch(self, tp: int, kv: str = "auto") -> dict:
        """Change the tensor-parallel size now; see ``async_switch``."""
        return self.loop.run_until_complete(self.async_switch(tp, kv))

    async def async_switch(
        self, tp: int, kv: str | None = "auto", *, decision: Decision | None = None, rows: records.Rows | None = None
    ) -> dict:
        """Change to ``tp``; unfinished requests go on. Idempotent: at ``tp`` already, nothing happens.

        kv: "migrate" or "recompute" the KV of unfinished requests, or "auto", for each whichever is cheaper by
        ``kv_costs``. Returns the record of the switch (seconds a phase, tokens, bytes), which is kept in ``switches``
        if there was anything to do, and is of zeros if not. Raises SwitchUndone if it was undone, EngineDead if it
        did not end; the engine cannot go on then. Cancelled, it goes on to its end in the background.
        """
        if tp not in self.settings.tp_sizes:
            raise ValueError(f"tp {tp} is not one of this engine's tp_sizes {self.settings.tp_sizes}")
        if (kv or "auto") not in KV_CHOICES:
            raise ValueError(f"kv={kv!r}: allowed are {', '.join(KV_CHOICES)}")
        return await self._alone(tp, kv or "auto", decision, rows)

    def rebalance(self, kv: str = "auto") -> dict:
        """Spread the unfinished requests evenly over the replicas now; see ``async_rebalance``."""
        return self.loop.run_until_complete(self.async_rebalance(kv))

    async def async_rebalance(
        self, kv: str | None = "auto", *, decision: Decision | None = None, rows: records.Rows | None = None
    ) -> dict:
        """Move as many unfinished requests to other replicas of the present size as it takes to make the counts even.

        A switch as any other, with its record and its errors; those that stay where they are keep their KV.
        """
        if (kv or "auto") not in KV_CHOICES:
            raise ValueError(f"kv={kv!r}: allowed are {', '.join(KV_CHOICES)}")
        return await self._alone(None, kv or "auto", decision, rows)

    async def _alone(self, tp: int | None, *arguments) -> dict:
        """One switch at a time, to its end even if who asked for it does not wait; tp None: rebalance."""

        async def alone() -> dict:
            async with self.switching:
                return await self._switch(tp or self.layout.tp, *arguments, rebalance=tp is None)

        return await asyncio.shield(asyncio.ensure_future(alone()))

    @contextlib.asynccontextmanager
    async def _at_base(self) -> AsyncIterator[None]:
        """In the base layout, which nobody changes meanwhile."""
        async with self.switching:
            await self._switch(self.settings.base, "auto")
            yield

    async def _switch(
        self,
        tp: int,
        kv: str,
        decision: Decision | None = None,
        rows: records.Rows | None = None,
        rebalance: bool = False,
    ) -> dict:
        asked = time.monotonic()
        if tp == self.layout.tp and (not rebalance or self.layout.dp == 1):
            self.watch.check()
            return records.nothing(tp, kv, asked, decision, rows)
        self.tokenizer_manager.check_memory()
        epoch = 1 + self.boards[0].epoch
        values = {SWITCH: tp, "pat_epoch": epoch, "pat_kv": KV_CHOICES.index(kv), "pat_rebalance": int(rebalance)}
        values |= self.kv_costs.to_message()
        message = sg.SetInternalStateReq(server_args=values)
        deadline_s = self.settings.switch_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                done = await self.tokenizer_manager.set_internal_state(message)
                while any(board.epoch < epoch for board in self.boards):  # at a base above 1 only leaders answer
                    await asyncio.sleep(1e-3)
        except TimeoutError:
            silent = [rank for rank, board in enumerate(self.boards) if board.epoch < epoch]
            reason = f"switch to tp {tp}: ranks {silent} did not answer within {deadline_s:.0f} s"
            await asyncio.to_thread(self.watch.declare_dead, reason)  # others who wait are told meanwhile
            self.watch.check()
        if not all(done):
            raise SwitchUndone(f"switch to tp {tp} was undone: {self.boards[0].read_switch()['error']}")
        self.layout = Layout(self.settings.ranks, tp)
        record = records.merge([board.read_switch() for board in self.boards], asked, decision, rows)
        self.switches.append(record)
        return record
