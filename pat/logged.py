"""Run a command so that its output is seen and kept, and its failure explained."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil

from pat.rl import processes

OWNER = "PAT_OWNER"  # process of the Snakemake that runs the rule; workflow/rules/common.smk sets it
GRACE_S = 20.0  # a training ends Ray and its servers on the way out
_TAIL = 1 << 17  # bytes of output that are searched for what matters
_TELLING = re.compile(r"(\w*(Error|Exception|Interrupt)\b.*:|^(config )?error:|\bkilled\b|out of memory)", re.I)


def telling_lines(text: str, most: int = 12) -> list[str]:
    """The lines of a failed command's output that say why, oldest first; its last lines if none does."""
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    telling = list(dict.fromkeys(line for line in lines[-400:] if _TELLING.search(line)))
    return (telling or lines)[-most:]


def _reason(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name
    return f"ended by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")


def _owner() -> int | None:
    """A descriptor that becomes readable when the Snakemake above this process ends; None if there is none above it."""
    pid = int(os.environ.get(OWNER, 0))
    try:
        return os.pidfd_open(pid) if pid in {each.pid for each in psutil.Process().parents()} else None
    except OSError:
        return None


def run(command: Sequence[str], log: Path, name: str) -> int:
    """Run ``command``; its output goes to the terminal and, as it comes, to ``log``. Returns its exit status.

    If it fails, ``name``, the lines that matter and the log's path are printed last. SIGTERM is passed on. A disk that
    is full costs the log, not the command. The command ends with the Snakemake that PAT_OWNER names, which may be
    killed, and with this process: what nobody waits for would measure beside its successor.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    tail, family, end = b"", [], float("inf")
    with log.open("wb", buffering=0) as file, selectors.DefaultSelector() as ready:
        owner = _owner()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            preexec_fn=partial(processes.end_with_parent, signal.SIGTERM),
        )
        # Ctrl-C reaches the command from the terminal; here it must not cut off the end of its output.
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        on_terminate = signal.signal(signal.SIGTERM, lambda number, _frame: process.send_signal(number))
        ready.register(process.stdout, selectors.EVENT_READ)
        if owner is not None:
            ready.register(owner, selectors.EVENT_READ)
        try:
            while True:
                found = {key.fileobj for key, _ in ready.select(timeout=1.0)}
                if owner in found:  # it waits for what it has started, unless it is killed
                    with contextlib.suppress(OSError):
                        file.write(f"{name}: the Snakemake that started it was killed, so this ends too\n".encode())
                    family, end = processes.tree(process.pid), time.monotonic() + GRACE_S
                    process.terminate()  # it may tidy up
                    ready.unregister(owner)
                if time.monotonic() > end:
                    process.kill()
                if process.stdout not in found:
                    # A daemon that it started may hold the pipe open for ever; only the command counts.
                    if process.poll() is not None:
                        break
                    continue
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    break
                tail = (tail + data)[-_TAIL:]
                for sink in (file, sys.stdout.buffer):
                    with contextlib.suppress(OSError):
                        sink.write(data)
                        sink.flush()
            code = process.wait()
            processes.end(family, grace_s=1.0)
        finally:
            signal.signal(signal.SIGTERM, on_terminate)
            signal.signal(signal.SIGINT, on_interrupt)
    if code:
        print(f"\n{name} failed ({_reason(code)}). The lines that matter:", file=sys.stderr)
        for line in telling_lines(tail.decode(errors="replace")):
            print(f"  {line}", file=sys.stderr)
        print(f"The whole log: {log}", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code
