"""What a node does at one tp from one moment on until its last request has ended, if nobody switches.

Array axes: q spans, n requests of the node.  Times are seconds since the course began.
"""

from collections.abc import Sequence

import numpy as np

from pat.simulate.machine import Machine, Requests
from pat.simulate.schedule import schedule

# A row of decode steps is timed in pieces of at most this many, each by the step at its middle: exact where the
# latency is linear in the context.
PIECE = 64


class _Clock:
    """Pieces of a replica's rows on the clock: `times` and decode `steps` at their boundaries, (pieces + 1,)."""

    def __init__(self, machine: Machine, tp: int, rows: np.ndarray) -> None:
        """rows: (rows, 5) decode steps, batch, tokens, fresh requests, prefix: see `pat.simulate.schedule.Steps`."""
        pieces = np.maximum(-(-rows[:, 0] // PIECE), 1)
        row = np.repeat(np.arange(len(rows)), pieces)
        index = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        total, batch, tokens, fresh, prefix = rows[row].T
        before = total * index // pieces[row]
        steps = total * (index + 1) // pieces[row] - before
        decode = machine.predictor.decode.seconds(tp, np.maximum(batch, 1), tokens + batch * (before + (steps - 1) / 2))
        seconds = steps * decode
        prefill = fresh > 0
        if prefill.any():
            seconds[prefill] = machine.prefill_s(tp, fresh[prefill], tokens[prefill], prefix[prefill])
        self.times = np.concatenate([[0.0], np.cumsum(seconds)])
        self.steps = np.concatenate([[0], np.cumsum(steps)])
        self.row_end = self.times[np.cumsum(pieces)]  # (rows,)

    def at(self, moment: float) -> int:
        """Whole decode steps made by then."""
        if moment >= self.times[-1]:
            return int(self.steps[-1])
        return int(np.interp(moment, self.times, self.steps) + 1e-9)

    def boundary(self, moment: float) -> tuple[float, int]:
        """When the step in progress at that moment ends, and the decode steps made by then."""
        if moment >= self.times[-1]:
            return moment, int(self.steps[-1])
        piece = int(np.searchsorted(self.times, moment, side="right")) - 1
        (t0, t1), (s0, s1) = self.times[piece : piece + 2], self.steps[piece : piece + 2]
        share = (moment - t0) / (t1 - t0)
        if share < 1e-12:
            return moment, int(s0)
        if s0 == s1:  # a prefill
            return float(t1), int(s1)
        steps = int(np.ceil(share * (s1 - s0) - 1e-9))
        end = t1 if steps == s1 - s0 else t0 + steps / (s1 - s0) * (t1 - t0)
        return max(float(end), moment), int(s0) + steps


class Course:
    """queues: the requests of each replica in the order in which they wait.

    held, left, in_kv: (n,) prompt and generated tokens, tokens still to generate, and whether its KV is there, of
    every request of the node; those in no queue are not looked at.
    """

    def __init__(
        self,
        machine: Machine,
        tp: int,
        queues: Sequence[Sequence[int]],
        held: np.ndarray,
        left: np.ndarray,
        in_kv: np.ndarray,
        requests: Requests,
    ) -> None:
        self.clocks: list[_Clock | None] = []
        request, replica, start, length, ready = ([] for _ in range(5))
        self.finish = np.full(len(held), -np.inf)  # (n,) seconds; -inf: ended before
        for number, queue in enumerate(queues):
            if not len(queue):
                self.clocks.append(None)
                continue
            own = np.asarray(queue)
            known = (values[own].tolist() for values in (held, left, in_kv))
            prompts = None
            if requests.group is not None:
                prompts = list(zip(requests.group[own].tolist(), requests.prompt[own].tolist(), strict=True))
            steps = schedule(*known, machine.capacity(tp), requests.cap, prompts, machine.prefill_tokens)
            clock = _Clock(machine, tp, np.array([steps.steps, steps.batch, steps.tokens, steps.fresh, steps.prefix]).T)
            self.clocks.append(clock)
            spans = own[steps.request]
            prefill = np.array(steps.prefill)
            ends = np.array(steps.ends)
            last = clock.row_end[steps.last]
            self.finish[spans[ends]] = last[ends]
            request.append(spans)
            replica.append(np.full(len(spans), number))
            start.append(steps.start)
            length.append(steps.length)
            ready.append(np.where(prefill >= 0, clock.row_end[prefill], -np.inf))
        self._request, self._replica, self._start, self._length, self._ready = (
            np.concatenate(each) for each in (request, replica, start, length, ready)
        )
        self.ends = np.sort(self.finish[self.finish > -np.inf])  # of the requests, ascending
        self._total()

    @property
    def seconds(self) -> float:
        """Until the last request has ended."""
        return float(self.ends[-1])

    def _total(self) -> None:
        """Decode steps of all replicas together, at every boundary of a piece."""
        clocks = [clock for clock in self.clocks if clock]
        self._times = np.unique(np.concatenate([clock.times for clock in clocks]))
        self._steps = sum(np.interp(self._times, clock.times, clock.steps) for clock in clocks)

    def live(self, moment: float) -> int:
        """Unfinished requests at that moment."""
        return len(self.ends) - int(np.searchsorted(self.ends, moment, side="right"))

    def steps(self, moment: float) -> float:
        """Decode steps of all replicas together by then."""
        return float(np.interp(moment, self._times, self._steps))

    def when_live(self, live: int) -> float:
        """The first moment at which at most `live` requests are left."""
        return float(self.ends[len(self.ends) - live - 1]) if live < len(self.ends) else 0.0

    def when_steps(self, steps: float) -> float:
        """The moment at which the replicas have made `steps` together; inf if they never do."""
        return float(np.interp(steps, self._steps, self._times)) if steps <= self._steps[-1] else np.inf

    def gained(self, moment: float) -> np.ndarray:
        """(n,) tokens that each request has generated since the course began."""
        steps = [clock.at(moment) if clock else 0 for clock in self.clocks]
        return self._tokens(np.array(steps), np.full(len(steps), moment))

    def stop(self, moment: float) -> tuple[float, np.ndarray, np.ndarray]:
        """All replicas end the step that they are in, and wait for the last to do so.

        Returns that moment, the tokens generated by then, (n,), and whose KV is there, (n,).
        """
        ends = [clock.boundary(moment) if clock else (moment, 0) for clock in self.clocks]
        moments, steps = (np.array(each) for each in zip(*ends, strict=True))
        own = moments[self._replica]
        running = (
            (self._ready <= own)
            & (self._start <= steps[self._replica])
            & (steps[self._replica] < self._start + self._length)
        )
        in_kv = np.zeros(len(self.finish), bool)
        in_kv[self._request[running]] = True
        return float(moments.max()), self._tokens(steps, moments), in_kv

    def _tokens(self, steps: np.ndarray, moments: np.ndarray) -> np.ndarray:
        """steps, moments: (replicas,)."""
        first = np.isfinite(self._ready) & (self._ready <= moments[self._replica])
        decoded = np.clip(steps[self._replica] - self._start, 0, self._length)
        return np.bincount(self._request, first + decoded, minlength=len(self.finish)).astype(np.int64)
