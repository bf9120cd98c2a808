"""What one replica does, counted in steps: who is admitted, ends or is retracted when.  Needs no clock.

A replica's course depends on token counts and on its KV capacity alone, so it is worked out request by request
first and timed afterwards, all steps of a row together (`course`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

# SGLang keeps this share of what a running request may still generate, at most RESERVED_OF tokens of it, free when
# it admits another (the settled new_token_ratio), and makes room for RETRACT_STEPS steps when it has to retract.
RESERVED_SHARE = 0.1
RESERVED_OF = 4096
RETRACT_STEPS = 20


@dataclass
class Steps:
    """The rows of a replica in order, and the spans of its requests.

    A row is one prefill (batch 0) or `steps` decode steps of an unchanging batch.  A span is a request's stay in the
    running batch, from its admission to its end or retraction.  Lists of equal length each.
    """

    steps: list[int] = field(default_factory=list)  # decode steps of the row, 0 for a prefill
    batch: list[int] = field(default_factory=list)  # requests that decode
    tokens: list[int] = field(default_factory=list)  # decode: KV tokens at the first step; prefill: new tokens
    fresh: list[int] = field(default_factory=list)  # requests that are prefilled
    prefix: list[int] = field(default_factory=list)  # tokens that these find in the cache

    request: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)  # decode steps that the replica has made before
    length: list[int] = field(default_factory=list)  # decode steps of the request
    prefill: list[int] = field(default_factory=list)  # row that prefills it and gives a token, -1: KV is there
    last: list[int] = field(default_factory=list)  # row after which it leaves
    ends: list[bool] = field(default_factory=list)  # it ends there; False: it is retracted


class _Replica:
    def __init__(self, held: Sequence[int], left: Sequence[int], capacity: int, reserve: int) -> None:
        self.held, self.left = list(held), list(left)
        self.capacity, self.reserve = capacity, reserve
        self.out = Steps()
        self.now = 0  # decode steps made
        self.offset = 0  # KV tokens at the next step = offset + running * now
        self.running: list[tuple[int, int, int]] = []  # heap of (end, request, span)

    @property
    def kv(self) -> int:
        """Tokens in KV at the next step."""
        return self.offset + len(self.running) * self.now

    def fits(self, request: int, more: int = 0, others: int = 0) -> bool:
        """Whether the request may be admitted beside those that run and `others` with `more` tokens in all."""
        count = len(self.running) + others
        used = self.kv + more + others + self.held[request] + 1
        return used <= self.capacity and (not count or used + self.reserve * (count + 1) <= self.capacity)

    def admit(self, request: int, prefill: int = -1) -> None:
        out = self.out
        if prefill >= 0:  # gives the next token
            self.held[request] += 1
            self.left[request] -= 1
        out.request.append(request)
        out.start.append(self.now)
        out.length.append(self.left[request])
        out.prefill.append(prefill)
        out.last.append(prefill)
        out.ends.append(True)
        if self.left[request]:
            heappush(self.running, (self.now + self.left[request], request, len(out.request) - 1))
            self.offset += self.held[request] - self.now

    def decode(self) -> None:
        """Steps until a request ends, or until there is no room for one more step."""
        out, batch = self.out, len(self.running)
        steps = self.running[0][0] - self.now
        room = (self.capacity - self.kv) // batch + 1
        if room < 1:
            raise ValueError(f"a request of {self.kv} tokens does not fit {self.capacity} tokens of KV")
        steps = min(steps, room)
        out.steps.append(steps)
        out.batch.append(batch)
        out.tokens.append(self.kv)
        out.fresh.append(0)
        out.prefix.append(0)
        self.now += steps
        while self.running and self.running[0][0] == self.now:
            _, request, span = heappop(self.running)
            self.offset -= self.held[request] - out.start[span]
            out.last[span] = len(out.steps) - 1

    def retract(self) -> list[int]:
        """Take out those with the fewest tokens until the others can go on; they wait again, without KV."""
        taken = []
        while len(self.running) > 1 and self.kv + (RETRACT_STEPS - 1) * len(self.running) > self.capacity:
            end, request, span = min(self.running, key=lambda r: (self.held[r[1]] - self.out.start[r[2]], -r[1]))
            self.running.remove((end, request, span))
            made = self.now - self.out.start[span]
            self.offset -= self.held[request] - self.out.start[span]
            self.held[request] += made
            self.left[request] -= made
            self.out.length[span], self.out.last[span] = made, len(self.out.steps) - 1
            self.out.ends[span] = False
            taken.append(request)
        heapify(self.running)
        return taken[::-1]


def schedule(
    held: Sequence[int],
    left: Sequence[int],
    in_kv: Sequence[bool],
    capacity: int,
    cap: int,
    prompts: Sequence[tuple[int, int]] | None = None,
    step_tokens: int = 8192,
) -> Steps:
    """The course of a replica whose requests queue in the order given.

    held: prompt and generated tokens of each.  left: tokens that each will still generate (>= 1).  in_kv: those whose
    KV is there.  capacity: KV tokens of the replica.  cap: most new tokens of a request.  prompts: (which, tokens) of
    each request's prompt; one that the replica has prefilled in an earlier step, of `step_tokens` tokens at most, is
    found in its cache, all but the last token, which saves its prefill but, here, no room.  First come, first
    served; prefill goes before decode.  ValueError when a request alone exceeds the capacity.
    """
    replica = _Replica(held, left, capacity, int(RESERVED_SHARE * min(cap, RESERVED_OF)))
    ready = set()
    for request in range(len(held)):  # KV that a switch has brought has its place before anybody is prefilled
        if in_kv[request] and replica.kv + replica.held[request] <= capacity:
            replica.admit(request)
            ready.add(request)
    waiting = deque(request for request in range(len(held)) if request not in ready)
    cached = {prompts[request][0] for request in ready} if prompts else set()
    full = False  # after a retraction nobody is admitted before a request has ended
    while waiting or replica.running:
        fresh: list[int] = []
        new: set[int] = set()  # prompts of the step that fills up
        tokens = prefix = in_step = 0
        while waiting and not full and replica.fits(waiting[0], tokens, len(fresh)):
            request = waiting.popleft()
            fresh.append(request)
            tokens += replica.held[request]
            if prompts:
                which, length = prompts[request]
                if in_step + replica.held[request] > step_tokens:
                    cached |= new
                    new, in_step = set(), 0
                found = length - 1 if which in cached else 0
                prefix += found
                in_step += replica.held[request] - found
                new.add(which)
        cached |= new
        if fresh:
            row = len(replica.out.steps)
            replica.out.steps.append(0)
            replica.out.batch.append(0)
            replica.out.tokens.append(tokens - prefix)
            replica.out.prefix.append(prefix)
            replica.out.fresh.append(len(fresh))
            for request in fresh:
                replica.admit(request, row)
        if replica.running:
            before = len(replica.running)
            replica.decode()
            full = full and len(replica.running) == before
            if replica.running and replica.kv > capacity:
                waiting.extendleft(replica.retract()[::-1])
                full = True
        elif not fresh:
            raise ValueError(f"a request of {replica.held[waiting[0]]} tokens does not fit {capacity} tokens of KV")
    return replica.out
