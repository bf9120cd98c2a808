"""Run a command until it or standard input ends, then end all that it has started and remove its folder.

    python -m pat.rl.guard FOLDER COMMAND...    (FOLDER may be empty)

Standard input is a pipe that the training holds open. So whatever ends the training, SIGKILL too, ends verl, Ray and
SGLang, of this training and of no other.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from pat.rl import processes

POLL_S = 0.2
GRACE_S = 1.0  # what has lost its training has nothing left to save


def run(command: Sequence[str], folder: str, **options) -> int:
    """The exit status of ``command``, 0 if standard input ended first; options: of subprocess.Popen."""
    processes.exit_on_sigterm()
    processes.adopt_orphans()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
    try:
        os.set_blocking(sys.stdin.fileno(), False)
        while child.poll() is None and not _ended(sys.stdin.fileno()):
            time.sleep(POLL_S)
        return child.returncode or 0
    finally:
        processes.end(processes.tree(os.getpid())[:-1], GRACE_S)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _ended(descriptor: int) -> bool:
    try:
        return os.read(descriptor, 1024) == b""
    except BlockingIOError:
        return False


def main() -> None:
    folder, *command = sys.argv[1:]
    status = run(command, folder)
    if status < 0:  # ended by a signal: so does this
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
