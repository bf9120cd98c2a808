"""The live list of a rank is what a look at every request would give, whatever has changed since the last step."""

import random
from array import array
from collections import deque
from types import SimpleNamespace

import pytest

from pat.engine.board import Board, request_key
from pat.engine.live import LiveList


class Req:
    def __init__(self, number: int) -> None:
        self.rid = f"r{number}"
        self.origin_input_ids, self.output_ids = array("q", [1] * (1 + number % 7)), array("q")
        self.finished_reason = None


def expected(*groups):
    live = {req.rid: req for group in groups for req in group if req.finished_reason is None}
    return [(request_key(rid), len(r.origin_input_ids), len(r.output_ids)) for rid, r in live.items()]


@pytest.mark.parametrize("seed", range(20))
def test_any_course_of_a_generation_is_shown_as_it_is(tmp_path, seed):
    """Arrivals, prefills, steps, ends, retractions and aborts at random; ends are seen before SGLang takes them out."""
    draw = random.Random(seed)
    board = Board.create(tmp_path, 0)
    shown = LiveList(board)
    running, waiting, made = [], [], 0
    for _ in range(60):
        for _ in range(draw.choice((0, 0, 1, 5))):
            waiting.append(Req(made))
            made += 1
        prefilled = []
        if waiting and draw.random() < 0.3:
            prefilled = [waiting.pop(0) for _ in range(draw.randint(1, len(waiting)))]
        for req in running + prefilled:
            req.output_ids.append(1)
            if draw.random() < 0.1:
                req.finished_reason = "stop"
        if waiting and draw.random() < 0.1:
            waiting[draw.randrange(len(waiting))].finished_reason = "abort"
        shown.show(running, prefilled, [], waiting)
        assert board.read_live() == expected(running, prefilled, waiting)
        running = [req for req in running + prefilled if req.finished_reason is None]
        waiting = [req for req in waiting if req.finished_reason is None]
        if running and draw.random() < 0.1:
            waiting.append(running.pop(draw.randrange(len(running))))  # retracted


def batch(reqs, decode: bool):
    return SimpleNamespace(reqs=reqs, forward_mode=SimpleNamespace(is_decode=lambda: decode))


def test_a_request_is_live_from_its_arrival_to_its_end_also_while_it_is_prefilled(tmp_path):
    board = Board.create(tmp_path, 0)
    waits, chunked, launched, decodes, just_prefilled = (Req(number) for number in range(5))
    scheduler = SimpleNamespace(
        running_batch=batch([decodes], True), chunked_req=chunked, waiting_queue=[waits], result_queue=deque()
    )
    shown = LiveList(board)
    scheduler.result_queue.append((batch([launched, chunked], False), "a result to come"))
    shown.of(scheduler, batch([just_prefilled], False))
    assert sorted(board.read_live()) == sorted(expected([decodes, just_prefilled, launched, chunked, waits]))
    del scheduler.result_queue  # SGLang's loop without overlap has none
    shown.of(scheduler, batch([decodes], True))
    assert sorted(board.read_live()) == sorted(expected([decodes, chunked, waits]))
    scheduler.running_batch.reqs, scheduler.waiting_queue, scheduler.chunked_req = [], [], None
    shown.of(scheduler)
    assert board.read_live() == []
