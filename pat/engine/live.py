"""What a rank shows of its live requests, at a cost per step that is small beside what SGLang itself does for each."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, compress
from operator import attrgetter

import numpy as np

from pat.engine.board import LIVE, Board, request_key

RID, PROMPT, OUTPUT = attrgetter("rid"), attrgetter("origin_input_ids"), attrgetter("output_ids")


class LiveList:
    """The live requests of one scheduler on its board.

    A step changes few of them: keys and prompt lengths are looked up for those that are new, and only the numbers of
    generated tokens are read for all.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self._seen: list = []  # SGLang's Req, some of them twice
        self._live: list = []
        self._rows = np.zeros(0, LIVE)

    def of(self, scheduler, batch=None) -> None:
        """Show what is unfinished in ``scheduler``; ``batch``: the one whose result has just been processed.

        A batch that decodes is part of the running one. One that is being prefilled is in no list of the scheduler
        between its launch and its result, and a request that is prefilled in chunks between two of them.
        """
        launched = [batch] if batch is not None else []
        launched += [other for other, _ in getattr(scheduler, "result_queue", ())]  # with overlap only
        chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
        prefilling = [other.reqs for other in launched if not other.forward_mode.is_decode()]
        self.show(scheduler.running_batch.reqs, *prefilling, chunked, scheduler.waiting_queue)

    def show(self, *groups: Iterable) -> None:
        """Show all requests of ``groups`` that have not finished, each once."""
        seen = [req for req in chain(*groups) if req.finished_reason is None]
        if seen != self._seen:
            self._seen = seen
            self._change(list(dict.fromkeys(seen)))
        self._rows["generated"] = np.fromiter(map(len, map(OUTPUT, self._live)), np.int64, len(self._live))
        self.board.show_live(self._rows)

    def _change(self, live: list) -> None:
        """The list is ``live`` now: often what is left of the last one, and new ones behind it."""
        left = [req.finished_reason is None for req in self._live]
        kept = list(compress(self._live, left))
        old = self._rows[left]
        if live[: len(kept)] != kept:
            kept, old = [], old[:0]
        new = live[len(kept) :]
        rows = np.zeros(len(new), LIVE)
        rows["key"] = np.fromiter(map(request_key, map(RID, new)), np.int64, len(new))
        rows["prompt"] = np.fromiter(map(len, map(PROMPT, new)), np.int64, len(new))
        self._live, self._rows = live, np.concatenate([old, rows])
