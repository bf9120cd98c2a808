"""The processes that a training has started, ended by pid: ``ray stop`` would end every Ray of this user."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

import psutil

END_S = 10.0  # longest that a process may take to end when asked, seconds; Slurm kills after 30

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


def tree(pid: int) -> list[psutil.Process]:
    """The process and all that descend from it; none if it has ended."""
    try:
        root = psutil.Process(pid)
        return [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return []


def naming(folder: str) -> list[psutil.Process]:
    """Processes with ``folder`` in their command line, as those of a Ray have its own, and all that they started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in argument for argument in process.info["cmdline"] or ()):
            found += tree(process.pid)
    return found


def end(processes: list[psutil.Process], grace_s: float) -> None:
    """End processes: asked first, then killed after ``grace_s`` seconds."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=END_S)


def exit_on_sigterm() -> None:
    """Slurm and Snakemake end a job by SIGTERM: leave through every ``finally``, once, since Slurm repeats it."""

    def leave(number, frame) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def one_vendor() -> dict[str, str]:
    """This process's environment as verl takes it.

    Slurm names a job's GPUs in the variables of every vendor unless its gres.conf says which there is; verl refuses
    to start with AMD's beside CUDA's.
    """
    unwanted = {"ROCR_VISIBLE_DEVICES"} if "CUDA_VISIBLE_DEVICES" in os.environ else set()
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def end_with_parent(by: int = signal.SIGKILL) -> None:
    """In a child before it runs its program: the kernel ends it with its parent, which may be killed (Linux)."""
    _libc.prctl(_PR_SET_PDEATHSIG, by)


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes a child of this process, so that ``tree`` has it (Linux)."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
