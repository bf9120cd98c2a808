"""One process at a time makes a stage: a lock that says who holds it.

A stage may outlive the Snakemake that started it, on another node too, and what it has measured so far is continued by
the next: two at once would write one file. The kernel frees the lock with its process, however that ends.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from pat.jobs import node_name

# What was told to end ends within seconds; a file server (NFS 4) frees the locks of a node that died after 90 s.
WAIT_S = 120.0


class Busy(RuntimeError):
    """Another process makes the stage; the message says which, since when and how to end it."""


@contextmanager
def only(folder: Path, stage: str, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold ``folder/locks/STAGE.lock`` during the block. Raises Busy if another process still does after ``wait_s``.

    Where the file system knows no locks, two processes are not told from each other, and a line says so.
    """
    locks = folder / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock, note = FileLock(locks / f"{stage}.lock"), locks / f"{stage}.json"
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"{_told(note, stage, folder)}; waiting up to {wait_s:.0f} s", flush=True)
            lock.acquire(timeout=wait_s)
    except Timeout:
        raise Busy(_told(note, stage, folder)) from None
    except (NotImplementedError, OSError) as error:
        print(f"warning: {locks} cannot be locked ({error}); see that nothing else makes {stage}", file=sys.stderr)
        yield
        return
    try:
        note.write_text(json.dumps(_self()) + "\n", encoding="utf-8")
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def made_now(folder: Path) -> set[str]:
    """Stages of the experiment in ``folder`` that are being made, as far as one can tell from here.

    Whoever was killed leaves its note: of this node's processes it is known, of another node's it is not.
    """
    found = set()
    for note in (folder / "locks").glob("*.json"):
        with suppress(OSError, ValueError):  # it has just ended, or begun
            owner = json.loads(note.read_text(encoding="utf-8"))
            if owner["node"] != node_name() or psutil.pid_exists(owner["pid"]):
                found.add(note.stem)
    return found


def _self() -> dict[str, str | int | None]:
    return {
        "pid": os.getpid(),
        "node": node_name(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(["pat", *sys.argv[1:]]),
    }


def _told(note: Path, stage: str, folder: Path) -> str:
    what = f"{stage} of {folder.resolve().name} is being made already"
    try:
        owner = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{what}, by a process that has only just begun"
    job = owner["slurm_job_id"]
    ended = f"scancel {job}" if job else f"kill {owner['pid']}"
    where = f"process {owner['pid']} on {owner['node']}" + (f" in Slurm job {job}" if job else "")
    return f"{what}, by {where} since {owner['since']} ({owner['command']}): wait for it, or end it by `{ended}`"
