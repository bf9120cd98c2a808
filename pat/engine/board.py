"""What every rank shows of itself in shared memory: its live requests, its steps, its last switch.

Each scheduler process writes its own part and nobody else's; the engine's main process reads all of them without
sending a message, so that the policy sees the whole group's state at a cost of microseconds a step.
"""

from __future__ import annotations

import hashlib
import json
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl

from pat.engine.shared import allocate

MAX_LIVE = 8192  # requests of one rank; more are counted, but not listed
MAX_STEPS = 1 << 16  # ring of steps
RECORD_BYTES = 1 << 16
READ_S = 0.05  # longest that a read waits, maybe in its user's event loop, for a write that takes microseconds
HEADER = np.dtype(
    [
        ("version", "i8"),
        ("live", "i8"),
        ("steps", "i8"),
        ("tp", "i8"),
        ("epoch", "i8"),
        ("record", "i8"),
        ("pid", "i8"),
        ("phase_epoch", "i8"),
        ("phase", "S24"),
    ]
)
STEP = np.dtype(
    [
        ("start", "f8"),  # time.monotonic(), one clock for all processes of a machine
        ("seconds", "f8"),  # the whole scheduler iteration
        ("decode", "i8"),  # 1 decode, 0 prefill
        ("tp", "i8"),
        ("batch", "i8"),  # requests
        ("context", "i8"),  # sum of their tokens in KV after the step
        ("tokens", "i8"),  # tokens computed in this step
    ]
)
LIVE = np.dtype([("key", "i8"), ("prompt", "i8"), ("generated", "i8")])


@lru_cache(maxsize=4 * MAX_LIVE)
def request_key(rid: str) -> int:
    """What stands for a request id on a board."""
    return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest(), "big") >> 1


def _sizes() -> list[int]:
    return [HEADER.itemsize, LIVE.itemsize * MAX_LIVE, STEP.itemsize * MAX_STEPS, RECORD_BYTES]


def board_bytes() -> int:
    """What the board of one rank takes."""
    return sum(_sizes())


class Board:
    """The shared part of one rank. ``create`` by the engine before its processes start, ``open`` in each."""

    def __init__(self, path: Path) -> None:
        sizes = _sizes()
        memory = np.memmap(path, dtype=np.uint8, mode="r+", shape=(sum(sizes),))
        ends = np.cumsum(sizes)
        header, live, steps, record = (memory[end - size : end] for end, size in zip(ends, sizes, strict=True))
        self.header = header.view(HEADER)[0:1]
        self.live, self.steps, self.record = live.view(LIVE), steps.view(STEP), record
        self._last_read: list[tuple[int, int, int]] = []

    @classmethod
    def create(cls, directory: Path, rank: int) -> Board:
        """Raises NoRoom."""
        path = directory / f"board.{rank}"
        allocate(path, sum(_sizes()))
        return cls(path)

    @classmethod
    def open(cls, directory: Path, rank: int) -> Board:
        return cls(directory / f"board.{rank}")

    # --- written by the rank -------------------------------------------------------------------------------
    def show_live(self, requests: np.ndarray | list[tuple[int, int, int]]) -> None:
        """Publish the live requests: (key of the request id, prompt tokens, generated tokens) of each, as LIVE."""
        count = min(len(requests), MAX_LIVE)
        rows = np.asarray(requests[:count], dtype=LIVE)
        self.header["version"] += 1  # odd: being written
        self.live[:count] = rows
        self.header["live"] = len(requests)
        self.header["version"] += 1

    def show_pid(self, pid: int) -> None:
        self.header["pid"] = pid

    def show_phase(self, epoch: int, phase: str) -> None:
        """How far this rank has come in switch ``epoch``, for the others to tell who keeps them waiting."""
        self.header["phase_epoch"], self.header["phase"] = epoch, phase.encode()

    def show_step(self, **step: float) -> None:
        index = int(self.header["steps"][0])
        row = self.steps[index % MAX_STEPS : index % MAX_STEPS + 1]
        for key, value in step.items():
            row[key] = value
        self.header["steps"] = index + 1

    def show_switch(self, record: dict, tp: int, epoch: int) -> None:
        data = json.dumps(record).encode()
        if len(data) > RECORD_BYTES:
            raise ValueError(f"switch record of {len(data)} bytes does not fit {RECORD_BYTES}")
        self.record[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        self.header["record"], self.header["tp"] = len(data), tp
        self.header["epoch"] = epoch  # last: who sees it may read the rest

    # --- read by the engine --------------------------------------------------------------------------------
    @property
    def tp(self) -> int:
        return int(self.header["tp"][0])

    @property
    def epoch(self) -> int:
        """The last switch that this rank has been through, be it done or undone."""
        return int(self.header["epoch"][0])

    @property
    def pid(self) -> int:
        """Process of the rank, 0 before it has started."""
        return int(self.header["pid"][0])

    @property
    def phase(self) -> tuple[int, str]:
        """(switch, phase) that the rank has come to."""
        return int(self.header["phase_epoch"][0]), self.header["phase"][0].decode()

    @property
    def live_count(self) -> int:
        return int(self.header["live"][0])

    @property
    def step_count(self) -> int:
        return int(self.header["steps"][0])

    def read_live(self) -> list[tuple[int, int, int]]:
        """(key of the request id, prompt tokens, generated tokens) of each live request, of one moment.

        Of an earlier one if the rank is held up in the middle of a write, or has died there, which others notice.
        """
        deadline = time.monotonic() + READ_S
        while time.monotonic() < deadline:
            before = int(self.header["version"][0])
            rows = self.live[: min(self.live_count, MAX_LIVE)].copy()
            if before % 2 == 0 and before == int(self.header["version"][0]):
                self._last_read = rows.tolist()
                break
            time.sleep(1e-4)
        return self._last_read

    def read_switch(self) -> dict:
        return json.loads(bytes(self.record[: int(self.header["record"][0])]))

    def step_rows(self, since: int) -> np.ndarray:
        """Steps number ``since`` and later (those that the ring still holds), in order, as STEP."""
        last = self.step_count
        first = max(since, last - MAX_STEPS)
        return self.steps[np.arange(first, last) % MAX_STEPS]

    def read_steps(self, since: int) -> pl.DataFrame:
        """The same with a column a field."""
        rows = self.step_rows(since)
        return pl.DataFrame({name: rows[name].copy() for name in STEP.names})
