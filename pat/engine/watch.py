"""Whether the processes of an engine live, and what becomes of its callers when one has ended.

SGLang ends the whole process tree, its user's process included, when one of its processes fails, and waits for ever
when a scheduler is killed. Here every call that waits for the engine ends with EngineDead instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from pat.engine.board import Board
from pat.engine.endings import Ending, culprit
from pat.engine.errors import EngineDead

log = logging.getLogger(__name__)

POLL_S = 0.2  # seconds between looks at the processes; a look costs some 10 microseconds a process
GRACE_S = 0.3  # after the first ending, for others and for what they have to say
SIGNAL_S = 2.0  # longest that a process lives on after it has reported its failure with a signal
END_S = 60.0  # longest that a killed process takes to give back what it holds, as in SGLang
SIG_IGN = 1  # of the C library
CONTROLLER = "the data-parallel controller"
T = TypeVar("T")

_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_last_end = -math.inf  # time.monotonic() at which an engine of this process died or was shut down


def ring_all() -> None:
    """A process of some engine of this process reported a failure (SIGQUIT): look which one."""
    for watch in list(_watches):
        watch.ring()


def take_sigquit() -> None:
    """SIGQUIT, by which SGLang's processes report a failure, ends this process no more.

    Python sets handlers in the main thread only. In another one, as in a Ray actor, it is ignored: the watch sees
    that a process has ended without being told.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, _on_sigquit)
    else:
        ctypes.CDLL(None).signal(signal.SIGQUIT, ctypes.c_void_p(SIG_IGN))


def _on_sigquit(number, _frame) -> None:
    if _watches:
        ring_all()
    else:  # not from an engine: do what it does by default
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class Watch:
    """The processes of one engine, looked at by a thread of this process.

    folder: the engine's, where its processes leave ``plugin.PID``. death: None, or why the engine is dead.
    """

    def __init__(self, folder: Path, boards: Sequence[Board]) -> None:
        self.folder, self.boards = folder, boards
        self.death: EngineDead | None = None
        self._members: dict[int, psutil.Process | None] = {}
        self._names: dict[int, str] = {}
        self._started: dict[int, multiprocessing.Process] = {}
        self._before = set(multiprocessing.active_children())
        self._waiting: set[asyncio.Future] = set()
        self._lock = threading.Lock()
        self._alarm, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, daemon=True, name="pat-watch")
        self._thread.start()
        _watches.add(self)

    def add(self, processes: Sequence[multiprocessing.Process], names: Sequence[str]) -> None:
        """Watch these processes of ours as well."""
        self._started |= {p.pid: p for p in processes}
        self._names |= {p.pid: name for p, name in zip(processes, names, strict=True)}
        self._members |= {p.pid: _process(p.pid) for p in processes if p.pid not in self._members}

    def ring(self) -> None:
        self._alarm.set()

    # --- callers -------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise EngineDead if the engine is dead."""
        if self.death is not None:
            raise EngineDead(str(self.death))

    async def outlive(self, awaitable: Awaitable[T]) -> T:
        """The result of ``awaitable``. Raises EngineDead when the engine dies meanwhile, or is dead."""
        work = asyncio.ensure_future(awaitable)
        with self._lock:
            self._waiting.add(work)
            if self.death is not None:
                work.cancel()
        try:
            return await work
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            with self._lock:
                self._waiting.discard(work)

    def declare_dead(self, reason: str) -> None:
        """End all calls that wait with EngineDead, and every process of the engine; from any thread, once.

        It waits for these processes; an event loop that calls it in a thread can tell its callers at once.
        """
        with self._lock:
            if self.death is not None:
                return
            self.death = EngineDead(f"the engine is dead: {reason}")
            waiting = list(self._waiting)
        _note_end()
        log.error("PAT: %s", self.death)
        for work in waiting:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits
                work.get_loop().call_soon_threadsafe(work.cancel)
        if left := self.end_processes():
            log.error("PAT: processes of the dead engine live on, %g s after they were killed: pids %s", END_S, left)

    # --- processes -----------------------------------------------------------------------------------------
    def end_processes(self) -> list[int]:
        """Kill whatever the engine has started, and what that has, and wait until it is gone.

        Returns the pids of those that are not within END_S.
        """
        deadline = time.monotonic() + END_S
        # While they are being started SGLang alone knows them; later on our user may have started others.
        ours = list(self._started.values()) or set(multiprocessing.active_children()) - self._before
        for child in ours:
            child.kill()
        family: dict[int, psutil.Process] = {}
        while True:
            self._find_members()  # in each round, since one that was being started may show itself late
            members = [process for process in self._members.values() if process is not None]
            for each in members + [child for member in members for child in _children(member)]:
                if each.pid not in family:
                    family[each.pid] = each
                    with contextlib.suppress(psutil.Error):
                        each.kill()
            for child in ours:
                child.join(0)  # reap it
            left = [pid for pid, process in family.items() if _lives(process)]
            left += [child.pid for child in ours if child.is_alive() and child.pid not in left]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(POLL_S / 20)

    def settle(self) -> None:
        """After an error that may be of a process which has ended: wait until that is known."""
        deadline = time.monotonic() + 2 * (POLL_S + GRACE_S)
        while self.death is None and self._ended() and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)

    def close(self) -> None:
        """Watch no more: the processes are about to be ended on purpose."""
        if not self._closed:
            _note_end()
        self._closed = True
        _watches.discard(self)
        self._alarm.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _run(self) -> None:
        while not self._closed and self.death is None:
            rung = self._alarm.wait(POLL_S)
            self._alarm.clear()
            now = time.monotonic()
            deadline = now + (SIGNAL_S if rung else 0)
            while not self._closed and not (ended := self._ended()) and time.monotonic() < deadline:
                time.sleep(POLL_S / 4)
            if self._closed:
                return
            if ended:
                time.sleep(GRACE_S)
                ended = dict.fromkeys(ended + self._ended())  # the first ones first
                if not self._closed:
                    self.declare_dead(str(culprit([self._ending(pid) for pid in ended])))
            elif rung and _last_end < now - SIGNAL_S:  # else it was about another engine
                self.declare_dead("a process of SGLang reported a failure (SIGQUIT); SGLang's log says which")

    def _find_members(self) -> None:
        for file in self.folder.glob("plugin.*"):
            pid = int(file.suffix[1:])
            if pid != os.getpid() and pid not in self._members:
                self._members[pid] = process = _process(pid)
                with contextlib.suppress(psutil.Error, AttributeError):
                    if "data_parallel_controller" in " ".join(process.cmdline()):
                        self._names[pid] = CONTROLLER

    def _ended(self) -> list[int]:
        """Processes that have ended, or failed and are about to."""
        if not self._started:  # they are being started
            self._find_members()
        return [
            pid
            for pid, process in list(self._members.items())
            if not _lives(process) or (self.folder / f"error.{pid}").exists()
        ]

    def _ending(self, pid: int) -> Ending:
        ranks = {board.pid: rank for rank, board in enumerate(self.boards)}
        name = f"rank {ranks[pid]}" if pid in ranks else self._names.get(pid, "a process of SGLang")
        exitcode = self._started[pid].exitcode if pid in self._started else None
        return Ending.of(name, pid, pid in ranks, self.folder, exitcode)


class Communicator:
    """One of SGLang's fan-outs to all schedulers, whose answers are not waited for longer than the engine lives."""

    def __init__(self, watch: Watch, communicator) -> None:
        self.watch, self.communicator = watch, communicator

    async def __call__(self, obj):
        return await self.watch.outlive(self.communicator(obj))

    def __getattr__(self, name: str):
        return getattr(self.communicator, name)


def _note_end() -> None:
    global _last_end
    _last_end = time.monotonic()


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _lives(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
