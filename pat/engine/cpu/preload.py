"""Imported by the fork server: what SGLang's processes need, and what makes the server one of the engine's family."""

from __future__ import annotations

import ctypes
import os
import signal

import setproctitle

from pat.engine.cpu import environment

PR_SET_PDEATHSIG = 1

setproctitle.setproctitle("pat::fork_server")  # before the environment changes: it keeps the title where that was
# SGLang's processes end when their parent dies, and tell it with SIGQUIT when they fail. The server is their parent
# now: it ends with the engine's process, and passes the signal on.
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))

environment.prepare()  # before SGLang is imported
os.environ.setdefault("TQDM_DELAY", "2")  # seconds; else a bar for every load of weights

from pat.engine import sglang_api as sg  # noqa: E402

for name in ("DataParallelController", "DetokenizerManager", "Scheduler"):
    getattr(sg, name)
