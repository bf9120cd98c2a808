"""Outputs of several ranks, read in any order, are handled in the order of their tokens."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.engine.ordering import KNOWN_REQUESTS, Counts, InOrder


def message(*rows):
    """rows: (request id, tokens up to and with the new ones, how many are new, whether it ends)."""
    return SimpleNamespace(
        rids=[rid for rid, *_ in rows],
        completion_tokens=[total for _, total, _, _ in rows],
        output_ids=[list(range(total - new, total)) for _, total, new, _ in rows],
        finished_reasons=[{"type": "length"} if end else None for *_, end in rows],
    )


class Reader:
    """Takes messages through InOrder as the detokenizer does."""

    def __init__(self, deadline_s=60.0):
        self.counts, self.answers = Counts(), {}
        self.in_order = InOrder(self.counts, deadline_s)

    def read(self, sent):
        for each in self.in_order.ready(sent):
            for rid, ids in zip(each.rids, each.output_ids, strict=True):
                self.answers.setdefault(rid, []).extend(ids)
            self.counts.note(each)


def test_what_the_new_rank_sends_waits_for_what_the_old_one_sent():
    reader = Reader()
    reader.read(message(("a", 10, 10, False)))
    reader.read(message(("a", 30, 10, False), ("b", 5, 5, False)))
    reader.read(message(("a", 31, 1, True)))
    assert reader.answers == {"a": list(range(10))}
    reader.read(message(("a", 20, 10, False)))
    assert reader.answers == {"a": list(range(31)), "b": list(range(5))}


def test_an_end_without_new_tokens_waits_too():
    reader = Reader()
    reader.read(message(("a", 7, 0, True)))
    assert reader.answers == {}
    reader.read(message(("a", 7, 7, False)))
    assert reader.answers == {"a": list(range(7))}
    assert reader.counts("a") == 0  # forgotten


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_any_order_of_the_sockets_gives_every_request_its_tokens_in_order(seed):
    rng = random.Random(seed)
    sockets, done = [[], [], []], dict.fromkeys("abcde", 0)
    for _ in range(4):  # layouts, in each of which every request has one rank
        rank_of = {rid: rng.randrange(3) for rid in done}
        for _ in range(5):
            for rank in range(3):
                rows = []
                for rid in [r for r in done if rank_of[r] == rank and rng.random() < 0.7]:
                    new = rng.randrange(4)
                    done[rid] += new
                    rows.append((rid, done[rid], new, False))
                sockets[rank].append(message(*rows))
    reader = Reader()
    while waiting := [socket for socket in sockets if socket]:
        reader.read(rng.choice(waiting).pop(0))
    assert {rid: reader.answers.get(rid, []) for rid in done} == {rid: list(range(n)) for rid, n in done.items()}
    assert not reader.in_order._held


def test_requests_that_nobody_waits_for_hold_nothing_up():
    in_order = InOrder({"a": 3}.get, 60)
    assert len(list(in_order.ready(message(("gone", 9, 1, False), ("a", 4, 1, False))))) == 1


def test_tokens_that_come_twice_are_an_error():
    reader = Reader()
    reader.read(message(("a", 10, 10, False)))
    with pytest.raises(RuntimeError, match=r"tokens 8 to 11 of request a came twice: 10 had come"):
        reader.read(message(("a", 11, 3, False)))


def test_what_never_comes_is_an_error_that_names_the_request():
    reader = Reader(deadline_s=0.0)
    reader.in_order.check()
    reader.read(message(("a", 10, 4, False)))
    with pytest.raises(TimeoutError, match=r"tokens 0 to 6 of request a did not come within 0 s"):
        reader.in_order.check()


def test_other_messages_pass():
    reader = Reader()
    embedding = SimpleNamespace(rids=["a"])
    assert list(reader.in_order.ready(embedding)) == [embedding]
    reader.counts.note(embedding)


def test_aborted_requests_that_never_end_are_forgotten_in_time():
    counts = Counts()
    for number in range(KNOWN_REQUESTS + 5):
        counts.note(message((str(number), 3, 3, False)))
    assert (counts("0"), counts(str(KNOWN_REQUESTS + 4))) == (0, 3)
