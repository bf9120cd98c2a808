"""Folders in shared memory that do not outlive the process that made them for long."""

from __future__ import annotations

import os
import shutil
import uuid
from multiprocessing import resource_tracker
from pathlib import Path

import psutil


def shared_folder(purpose: str) -> Path:
    """A new folder in shared memory (or /tmp) for this process.

    Whoever makes it removes it; what processes that were killed have left of the same purpose is removed here.
    """
    root = _root()
    # Containers may share the memory, but not the numbers of processes: each clears up after its own.
    mine = f"pat-{purpose}-{Path('/proc/self/ns/pid').stat().st_ino}"
    for folder in root.glob(f"{mine}-*"):
        pid = folder.name.removeprefix(f"{mine}-").split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    folder = root / f"{mine}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return folder


def is_shared_folder(path: str | Path) -> bool:
    """Whether ``path`` is a folder that ``shared_folder`` has made."""
    return Path(path).parent == _root() and Path(path).name.startswith("pat-")


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


def _root() -> Path:
    return Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp")
