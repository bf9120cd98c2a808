"""Whether a process has ended, waited for with a deadline."""

import time

import psutil

DEADLINE_S = 30.0


def gone(pid: int) -> bool:
    """Whether the process has ended, or does within the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
