"""SGLang's processes on a CPU, forked from one that has imported SGLang instead of started afresh.

SGLang spawns the data-parallel controller, and that spawns the schedulers; each then imports SGLang for 8 s, one
after the other. Forked from Python's fork server, which imports it once while the engine's own process does the
same, they start at once. Not used with an accelerator: there the start of a scheduler is dominated by other things.

Read in CPython 3.11's multiprocessing: a forked process has the server's address, but would start a server of its
own for its children, and all have the environment of the moment when the server started.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from multiprocessing import context, forkserver

from pat.engine.cpu import environment
from pat.engine.shared import start_resource_tracker

PRELOAD = "pat.engine.cpu.preload"


def warm() -> None:
    """Start the fork server ahead of its use: it imports SGLang while this process does. Nothing on accelerators."""
    if environment.has_accelerator():
        return
    environment.prepare()
    _forget_reaped_server()
    start_resource_tracker()
    forkserver.set_forkserver_preload([PRELOAD])
    forkserver.ensure_running()


def _forget_reaped_server() -> None:
    """Let multiprocessing start another server if ours was ended and that was waited for elsewhere, as psutil does.

    SGLang ends all children of its process when it fails, the server too. multiprocessing would fail to wait.
    """
    server = forkserver._forkserver
    if server._forkserver_pid is None:
        return
    try:
        os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        os.close(server._forkserver_alive_fd)
        server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process):
        if not isinstance(process._target, partial):
            process._target = partial(run, dict(os.environ), process._target)
        return context.ForkServerProcess._Popen(process)


class _Context(context.ForkServerContext):
    Process = _Process


def use() -> None:
    """Fork what this process and its children start through multiprocessing from now on."""
    _forget_reaped_server()
    forkserver.set_forkserver_preload([PRELOAD])
    context._default_context._actual_context = _Context()


def run(environ: dict[str, str], target, *args, **kwargs) -> None:
    """In a forked process: ``target`` with its starter's environment, and the same server for its own children."""
    os.environ.clear()
    os.environ.update(environ)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # in the server it is passed on, see preload
    forkserver._forkserver.ensure_running = lambda: None
    use()
    target(*args, **kwargs)
