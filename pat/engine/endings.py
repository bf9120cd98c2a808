"""How a process of an engine ended, as far as it, or the one that started it, could still tell; pure but for files.

Whoever knows something leaves a file in the engine's shared folder: a process that fails writes what the exception
was, and the data-parallel controller writes the exit code of each scheduler that it has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path


@contextlib.contextmanager
def last_words(folder: Path) -> Iterator[None]:
    """An exception that leaves the block is noted for the engine, then goes its way."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):  # the engine may be gone, and its folder with it
            _write(folder / f"error.{os.getpid()}", f"{type(error).__name__}: {error}")
        raise


def with_last_words(folder: Path):
    """A hook around a function that runs as long as its process."""

    def around(original, *args, **kwargs):
        with last_words(folder):
            return original(*args, **kwargs)

    return around


def tell_exit_codes(folder: Path, processes: Iterable) -> threading.Thread:
    """Note the exit code of each of this process's ``processes`` (multiprocessing) when it ends, in a thread."""
    thread = threading.Thread(target=_wait_for, args=(folder, list(processes)), daemon=True, name="pat-exit-codes")
    thread.start()
    return thread


def _wait_for(folder: Path, processes: list) -> None:
    while processes:
        connection.wait([process.sentinel for process in processes])
        for process in [p for p in processes if not p.is_alive()]:
            processes.remove(process)
            with contextlib.suppress(OSError):
                _write(folder / f"exitcode.{process.pid}", str(process.exitcode))


def _write(file: Path, text: str) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.rename(file)  # a reader never sees half a file


@dataclass(frozen=True)
class Ending:
    """One process that has ended.

    who: as its engine calls it.  error: the exception that ended it, None if it left none.  exitcode: as
    multiprocessing has it, negative for a signal, None if nobody knows.
    """

    who: str
    pid: int
    is_rank: bool
    error: str | None = None
    exitcode: int | None = None

    @classmethod
    def of(cls, who: str, pid: int, is_rank: bool, folder: Path, exitcode: int | None = None) -> Ending:
        """With what has been noted in ``folder``; a known ``exitcode`` wins over that."""
        noted = _read(folder / f"exitcode.{pid}")
        code = exitcode if exitcode is not None or noted is None else int(noted)
        return cls(who, pid, is_rank, _read(folder / f"error.{pid}"), code)

    def __str__(self) -> str:
        who = f"{self.who} (pid {self.pid})"
        if self.error:
            return f"{who} failed: {self.error}"
        if self.exitcode is None:
            return f"{who} has ended; if it was killed, the kernel's log (dmesg) may say why"
        if self.exitcode >= 0:
            return f"{who} ended with exit code {self.exitcode}"
        number = -self.exitcode
        name = signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
        memory = "; the system does so when memory runs out, see dmesg" if number == signal.SIGKILL else ""
        return f"{who} was killed by {name}{memory}"


def culprit(endings: list[Ending]) -> Ending:
    """Of processes that ended within a moment, in the order in which that was seen, the one that ended of itself.

    When a rank is killed the others lose their connections and fail too; when one fails, SGLang's processes take each
    other down without a word.
    """

    def order(ending: Ending) -> int:
        if ending.is_rank and (ending.exitcode or 0) < 0:
            return 0
        if ending.error:
            return 1
        return 2 if ending.is_rank else 3

    return min(endings, key=order)


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None
