"""Faults on demand: what an engine does when a rank fails in the middle of a switch can be tried, by tests and users.

A file ``fault`` in the engine's shared folder says which rank is struck, in which phase and how; it is read at each
phase, the end of a rank's start ("start") among them, and strikes once.

    engine.settings.path.joinpath("fault").write_text('{"rank": 1, "phase": "move", "kind": "exception"}')
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

KINDS = ("exception", "memory", "delay", "kill")


class Faults:
    """The faults of one rank.

    kind: "exception", "memory" (an allocation that fails), "delay" by ``seconds``, or "kill" (SIGKILL to this rank).
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.file, self.rank = folder / "fault", rank

    def strike(self, phase: str) -> None:
        """Called at the beginning of ``phase``. Raises, sleeps or kills as the file says, else does nothing."""
        if not self.file.exists():
            return
        try:
            fault = json.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:  # it was another rank's, and has struck
            return
        if (fault["rank"], fault["phase"]) != (self.rank, phase):
            return
        self.file.unlink()
        if fault["kind"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault["kind"] == "delay":
            time.sleep(fault["seconds"])
        if fault["kind"] == "memory":
            raise MemoryError("a fault on demand")
        if fault["kind"] == "exception":
            raise RuntimeError("a fault on demand")
