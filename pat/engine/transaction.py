"""How all ranks go through a switch together: phases, votes, deadlines, and what to say when one is missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from pat.engine.board import Board
from pat.engine.errors import SwitchError
from pat.engine.faults import Faults
from pat.engine.groups import Groups
from pat.engine.settings import Settings

log = logging.getLogger("sglang.pat")
PHASES = ("agree", "quiesce", "collect", "move", "rebind", "resume")
T = TypeVar("T")


class SwitchAborted(RuntimeError):
    """The switch was undone; generation goes on in the old layout. The message says which rank failed and why."""


@dataclass
class Record:
    """One switch as one rank saw it; times are time.monotonic() seconds, one clock for all processes of a machine."""

    epoch: int
    tp_from: int
    tp_to: int
    kv: str  # "migrate", "recompute" or "auto"
    unfinished: int = 0  # of the whole group
    requests_moved: int = 0  # of them, those that went to another layout or another replica
    kv_tokens_moved: int = 0  # of the whole group
    kv_tokens_recomputed: int = 0  # of the whole group
    bytes_moved: int = 0  # sent by this rank to others
    exchange_s: float = 0.0  # of "move": the all-to-alls alone
    error: str | None = None
    ends: dict[str, float] = field(default_factory=dict)  # when each phase ended


class Transaction:
    """One rank's way through the phases of switch ``record``."""

    def __init__(self, record: Record, settings: Settings, board: Board, rank: int, groups: Groups) -> None:
        self.record, self.settings, self.board, self.rank, self.groups = record, settings, board, rank, groups
        self.faults = Faults(settings.path, rank)

    def phase(self, name: str, work: Callable[[], T]) -> T:
        """Run a phase that can still be undone, time it, and let all ranks agree that it went well everywhere."""
        result, error = self._attempt(name, work)
        self._vote(name, error)
        return result

    def shared(self, name: str, work: Callable[[], T]) -> list[T]:
        """The same, with the result of every rank."""
        result, error = self._attempt(name, work)
        return self._vote(name, error, result)

    def last_phase(self, name: str, work: Callable[[], None]) -> None:
        """Run a phase that cannot be undone. Raises SwitchError if it fails."""
        _, error = self._attempt(name, work)
        if error:
            raise SwitchError(f"{error}; it cannot be undone any more, and the engine cannot go on")
        self.record.ends[name] = time.monotonic()

    def _attempt(self, name: str, work: Callable[[], T]) -> tuple[T | None, str | None]:
        self.board.show_phase(self.record.epoch, name)
        try:
            self.faults.strike(name)
            return work(), None
        except Exception as exception:
            log.exception("PAT rank %d failed in phase %s", self.rank, name)
            return None, f"rank {self.rank}, phase {name}: {type(exception).__name__}: {exception}"

    def _vote(self, phase: str, error: str | None, value=None) -> list:
        """Every rank's ``value``. Raises SwitchAborted if any has an error, SwitchError if one does not answer.

        Whatever can fail on one rank alone is voted on before the ranks exchange anything else: a rank that raised
        would otherwise leave the others waiting.
        """
        self.board.show_phase(self.record.epoch, f"{phase}, done")
        answers: list = [None] * self.settings.ranks
        try:
            # For the first, a rank may still be in a step.
            group = self.groups.first_votes if phase == PHASES[0] else self.groups.votes
            dist.all_gather_object(answers, (error, value), group=group)
        except RuntimeError as exception:  # gloo's, at the deadline or when a peer's connection closes
            raise SwitchError(f"{self._who_is_missing(phase)} ({exception})") from exception
        # "move" is two steps, of which the second moves the KV
        self.record.ends["move" if phase == "exchange" else phase] = time.monotonic()
        failed = [e for e, _ in answers if e]
        if failed:
            raise SwitchAborted("; ".join(failed))
        return [v for _, v in answers]

    def _who_is_missing(self, phase: str) -> str:
        boards = [Board.open(self.settings.path, rank) for rank in range(self.settings.ranks)]
        here = self.board.phase
        behind = [f"rank {r} is at {b.phase[1]!r}" for r, b in enumerate(boards) if b.phase != here]
        return (
            f"switch {self.record.epoch} to tp {self.record.tp_to}: rank {self.rank} waited for all ranks to end "
            f"phase {phase}, in vain; {', '.join(behind) or 'all have come so far'}"
        )
