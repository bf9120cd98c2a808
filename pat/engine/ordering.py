"""Outputs in the order of their tokens, whichever rank's socket is read first (pure).

A rank sends what is new of each request, without saying where it belongs. After a switch another rank goes on with a
request, over another socket, and a reader that was held up may read that one first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

KNOWN_REQUESTS = 1 << 18  # requests whose tokens a reader counts; some that were aborted are never heard of again


class InOrder:
    """Holds a message back until what comes before it of each of its requests has been handled.

    handled: {request id: how many of its tokens have been handled}, None for a request that nobody waits for.
    deadline_s: longest that a message may be held, seconds.
    """

    def __init__(self, handled: Callable[[str], int | None], deadline_s: float) -> None:
        self.handled, self.deadline_s = handled, deadline_s
        self._held: list[tuple[float, Any]] = []

    def ready(self, message: Any) -> Iterator[Any]:
        """``message`` and those held before that can be handled now; each must be before the next one is asked for.

        message: with rids, output_ids and completion_tokens (of all tokens, the new ones included) as SGLang's outputs
        have them; any other is passed through. Raises RuntimeError for tokens that have been handled before.
        """
        self._held.append((time.monotonic(), message))
        while (number := self._first_ready()) is not None:
            yield self._held.pop(number)[1]

    def _first_ready(self) -> int | None:
        return next((i for i, (_, message) in enumerate(self._held) if self._missing(message) is None), None)

    def _missing(self, message: Any) -> tuple[str, int, int] | None:
        """A request of which tokens are missing: (its id, tokens handled, tokens before the new ones). Or None."""
        counts = getattr(message, "completion_tokens", None)
        if counts is None or message.output_ids is None:
            return None
        for rid, total, new in zip(message.rids, counts, message.output_ids, strict=True):
            handled, before = self.handled(rid), total - len(new)
            if handled is None or handled == before:
                continue
            if handled < before:
                return rid, handled, before
            if len(new):
                raise RuntimeError(f"tokens {before} to {total} of request {rid} came twice: {handled} had come before")
        return None

    def check(self) -> None:
        """Raise TimeoutError if a message has been held longer than the deadline."""
        if not self._held or time.monotonic() - self._held[0][0] < self.deadline_s:
            return
        rid, handled, before = self._missing(self._held[0][1])
        raise TimeoutError(
            f"tokens {handled} to {before} of request {rid} did not come within {self.deadline_s:g} s of those that "
            "follow them"
        )


class Counts:
    """How many tokens of each request a reader has handled, for one that keeps no requests itself."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    def __call__(self, rid: str) -> int:
        return self._counts.get(rid, 0)

    def note(self, message: Any) -> None:
        """``message`` has been handled."""
        counts = getattr(message, "completion_tokens", None)
        if counts is None:
            return
        for rid, total, reason in zip(message.rids, counts, message.finished_reasons, strict=True):
            self._counts[rid] = max(total, self(rid))  # one that brings nothing new may come late
            if reason is not None:
                del self._counts[rid]
        while len(self._counts) > KNOWN_REQUESTS:
            self._counts.popitem(last=False)
