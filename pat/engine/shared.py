"""Folders in shared memory that do not outlive the process that made them for long, and files with memory behind.

Shared memory may be small: a container has 64 MB of it unless its user asks for more. A write to a mapped file that
has no memory behind it ends the process (SIGBUS), so room is asked for first, and taken where a file is made.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import uuid
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")


class NoRoom(OSError):
    """A folder has not the room that is needed. The message names both, and the way out."""

    def __init__(self, what: str, needed: int, folders: list[Path]) -> None:
        free = ", ".join(f"{folder} has {_free(folder):,}" for folder in folders) or "there is none to write to"
        super().__init__(
            errno.ENOSPC,
            f"{what} needs a folder with {needed:,} bytes free: {free}; give a container more shared memory "
            "(docker run --shm-size=8g; Kubernetes: an emptyDir of medium Memory at /dev/shm), or set TMPDIR to a "
            "folder with room",
        )

    def __str__(self) -> str:
        return self.strerror


def shared_folder(purpose: str, needed: int = 0) -> Path:
    """A new folder for this process, with ``needed`` bytes free: in shared memory, else among temporary files.

    Whoever makes it removes it; what processes that were killed have left of the same purpose is removed here.
    Raises NoRoom.
    """
    # Containers may share the memory, but not the numbers of processes: each clears up after its own.
    mine = f"pat-{purpose}-{Path('/proc/self/ns/pid').stat().st_ino}"
    for folder in [folder for root in _roots() for folder in root.glob(f"{mine}-*")]:
        pid = folder.name.removeprefix(f"{mine}-").split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    root = next((root for root in _roots() if _free(root) >= needed), None)
    if root is None:
        raise NoRoom(f"pat ({purpose})", needed, _roots())
    folder = root / f"{mine}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return folder


def require_room(folder: Path, what: str, needed: int) -> None:
    """Raise NoRoom if ``folder`` has not ``needed`` bytes free for ``what``."""
    if _free(folder) < needed:
        raise NoRoom(what, needed, [folder])


def is_shared_folder(path: str | Path) -> bool:
    """Whether ``path`` is a folder that ``shared_folder`` has made."""
    named = re.fullmatch(r"pat-[a-z]+-\d+-\d+-[0-9a-f]{8}", Path(path).name)
    return Path(path).parent in (MEMORY, _temporary()) and named is not None


def allocate(path: Path, size: int) -> None:
    """Make the file ``path`` of ``size`` bytes of zeros, with memory behind each. Raises NoRoom."""
    with open(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
        except OSError as error:
            path.unlink()
            if error.errno != errno.ENOSPC:
                raise
            raise NoRoom(path.name, size, [path.parent]) from error


def start_resource_tracker() -> None:
    """Start multiprocessing's tracker of shared memory, unless it runs, so that it clears up without a word.

    Processes that are killed, as an engine's are at its end, leave semaphores and shared memory behind. The tracker
    removes them when this process ends, and would warn of each kind.
    """
    before = os.environ.get("PYTHONWARNINGS")
    rule = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ["PYTHONWARNINGS"] = f"{before},{rule}" if before else rule
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def _roots() -> list[Path]:
    return [root for root in (MEMORY, _temporary()) if os.access(root, os.W_OK)]


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free
