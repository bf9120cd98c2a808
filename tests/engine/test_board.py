"""A rank's board: what is shown is what is read, and never half of it."""

import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pat.engine import board as module
from pat.engine.board import Board, request_key

STEP = {"start": 1.0, "seconds": 0.5, "decode": 1, "tp": 2, "batch": 3, "context": 40, "tokens": 3}


@pytest.fixture
def pair(tmp_path):
    """The board of rank 3 as its process and as the engine hold it."""
    engine = Board.create(tmp_path, 3)
    return Board.open(tmp_path, 3), engine


def test_a_new_board_shows_nothing(pair):
    _, engine = pair
    assert (engine.live_count, engine.step_count) == (0, 0)
    assert engine.read_live() == []
    assert engine.read_steps(0).height == 0


@pytest.mark.parametrize("rows", [[(7, 12, 0)], [(2**32 - 1, 5, 9), (1, 2, 3)], []])
def test_live_requests_are_read_as_they_were_shown(pair, rows):
    rank, engine = pair
    rank.show_live([(1, 1, 1)] * 5)
    rank.show_live(rows)
    assert engine.read_live() == rows
    assert engine.live_count == len(rows)


def test_boards_of_two_ranks_are_apart(tmp_path):
    boards = [Board.create(tmp_path, rank) for rank in (0, 1)]
    boards[0].show_live([(1, 2, 3)])
    assert boards[1].read_live() == []


def test_requests_beyond_the_room_are_counted_but_not_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LIVE", 4)
    board = Board.create(tmp_path, 0)
    board.show_live([(i, 10 + i, i) for i in range(6)])
    assert board.live_count == 6
    assert board.read_live() == [(i, 10 + i, i) for i in range(4)]


@given(made=st.integers(0, 30), since=st.integers(0, 30))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_steps_are_read_in_order_as_far_as_the_ring_goes_back(tmp_path, monkeypatch, made, since):
    monkeypatch.setattr(module, "MAX_STEPS", 8)
    board = Board.create(tmp_path, 0)
    for number in range(made):
        board.show_step(**STEP | {"context": number, "seconds": number / 8})
    steps = board.read_steps(since)
    kept = [number for number in range(made) if number >= since and number >= made - 8]
    assert board.step_count == made
    assert steps["context"].to_list() == kept
    assert steps["seconds"].to_list() == [number / 8 for number in kept]


def test_a_step_has_all_its_columns(pair):
    rank, engine = pair
    rank.show_step(**STEP)
    assert engine.read_steps(0).to_dicts() == [STEP]


def test_steps_that_were_read_do_not_change_afterwards(pair):
    rank, engine = pair
    rank.show_step(**STEP)
    before = engine.read_steps(0)
    engine.steps["tp"] = 9
    assert before["tp"].to_list() == [2]


def test_the_last_switch_is_read_whole_after_longer_and_shorter_ones(pair):
    rank, engine = pair
    for epoch, record in enumerate(({"error": "long " * 100}, {"error": None}, {"seconds": {"move": 0.25}}), 1):
        rank.show_switch(record, tp=2, epoch=epoch)
        assert engine.read_switch() == record
        assert (int(engine.header["tp"][0]), int(engine.header["epoch"][0])) == (2, epoch)


def test_a_switch_record_that_is_too_large_is_refused_and_leaves_the_old_one(pair):
    rank, engine = pair
    rank.show_switch({"n": 1}, tp=1, epoch=1)
    with pytest.raises(ValueError, match=f"does not fit {module.RECORD_BYTES}"):
        rank.show_switch({"error": "x" * module.RECORD_BYTES}, tp=2, epoch=2)
    assert engine.read_switch() == {"n": 1}
    assert int(engine.header["epoch"][0]) == 1


def test_a_reader_waits_until_a_write_has_ended(pair, monkeypatch):
    rank, engine = pair
    rank.show_live([(1, 1, 1)])
    rank.header["version"] += 1  # a write has begun
    rank.live["generated"][0] = 99

    def end_of_write(_seconds):
        monkeypatch.undo()
        rank.show_live([(2, 2, 2), (3, 3, 3)])
        rank.header["version"] += 1

    monkeypatch.setattr(module.time, "sleep", end_of_write)
    assert engine.read_live() == [(2, 2, 2), (3, 3, 3)]


def test_of_a_write_that_never_ends_nothing_is_read_and_nobody_waits_for_it(pair):
    rank, engine = pair
    rank.show_live([(1, 2, 3)])
    assert engine.read_live() == [(1, 2, 3)]
    rank.header["version"] += 1
    rank.live[0]["key"] = 9
    assert engine.read_live() == [(1, 2, 3)]


WRITER = """
import sys, time
from pathlib import Path
from pat.engine.board import Board
board, number, end = Board.open(Path(sys.argv[1]), 0), 0, time.monotonic() + 60
while time.monotonic() < end:
    number += 1
    board.show_live([(number, number, number)] * (1 + number % 200))
    time.sleep(0.0002)
"""


def test_a_reader_beside_a_writing_process_sees_one_moment_at_a_time(tmp_path):
    board = Board.create(tmp_path, 0)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    seen, deadline = set(), time.monotonic() + 50
    try:
        while len(seen) < 300:
            assert time.monotonic() < deadline
            assert writer.poll() is None
            rows = board.read_live()
            if rows:
                number = rows[0][0]
                assert rows == [(number, number, number)] * (1 + number % 200)
                seen.add(number)
    finally:
        writer.kill()
        writer.wait()


def test_a_request_is_known_by_the_same_key_in_every_process():
    code = "from pat.engine.board import request_key; print(request_key('chatcmpl-1'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) == request_key("chatcmpl-1")
    assert len({request_key(f"chatcmpl-{i}") for i in range(1000)}) == 1000
