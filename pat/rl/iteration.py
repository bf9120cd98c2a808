"""The requests of one generation stage: every one that came in must go out, with a reason (pure)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pat.engine.board import request_key
from pat.rl.identity import Identities

COUNTED = "pat/samples"  # metric of verl's lines: samples that an iteration was trained on


class IterationError(RuntimeError):
    """A generation stage lost a request, or got another number of them than it should."""


@dataclass
class Request:
    """One request; times are time.monotonic() seconds."""

    key: int
    prompt_tokens: int
    seed: int
    length: int | None  # replayed response length, tokens
    arrive: float
    finish: float | None = None
    response_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None


class Iteration:
    """Keeps account of the requests of one iteration on one replica."""

    def __init__(self, number: int, identities: Identities, expected: int | None) -> None:
        self.number, self.identities, self.expected = number, identities, expected
        self.requests: list[Request] = []

    def arrive(self, rid: str, prompt_ids: Sequence[int], number: tuple[int, int] | None = None) -> Request:
        seed, length = self.identities.next(prompt_ids, number)
        request = Request(request_key(rid), len(prompt_ids), seed, length, time.monotonic())
        self.requests.append(request)
        return request

    def finish(self, request: Request, response_tokens: int, reason: str | None) -> None:
        request.finish, request.response_tokens, request.finish_reason = (
            time.monotonic(),
            response_tokens,
            reason,
        )

    def check(self) -> None:
        """Raise IterationError unless every request came back with a reason, in the expected number."""
        where = f"iteration {self.number}"
        failed = [r for r in self.requests if r.error]
        if failed:
            raise IterationError(
                f"{where}: {len(failed)} of {len(self.requests)} requests failed, first: {failed[0].error}"
            )
        waiting = [r for r in self.requests if r.finish is None]
        if waiting:
            raise IterationError(f"{where}: {len(waiting)} of {len(self.requests)} requests have no answer")
        reasonless = [r for r in self.requests if r.finish_reason not in ("stop", "length")]
        if reasonless:
            reasons = sorted({str(r.finish_reason) for r in reasonless})
            raise IterationError(
                f"{where}: {len(reasonless)} requests ended with {', '.join(reasons)}, not stop or length"
            )
        if self.expected is not None and len(self.requests) != self.expected:
            raise IterationError(f"{where}: {len(self.requests)} samples came back, {self.expected} were asked for")

    def record(self) -> list[dict]:
        return [asdict(request) for request in self.requests]


def lengths(record: Sequence[Mapping], cap: int) -> tuple[list[int], list[bool]]:
    """Response lengths (tokens) of ``Iteration.record`` and whether each ended by itself, for the length model.

    A replayed length is cut by design: it counts as ended unless it is the cap.
    """
    tokens = [request["response_tokens"] for request in record]
    ended = [request["finish_reason"] == "stop" or request["response_tokens"] < cap for request in record]
    return tokens, ended
