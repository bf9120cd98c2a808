"""Requests as bytes in shared memory: what is read is what was written, and only what is needed is read."""

import errno
import pickle
from array import array
from types import SimpleNamespace

import pytest

from pat.engine import bodies
from pat.engine.shared import NoRoom

HANDLE = open(__file__)  # noqa: SIM115  (cannot be pickled, like a tokenizer or a metrics collector)


def req(rid, prompt, output, sent=0, **more):
    ids = array("q", prompt)
    logprob = SimpleNamespace(
        output_token_logprobs_val=[-0.1 * n for n in output],
        output_token_logprobs_idx=list(output),
        output_top_logprobs_val=[[-0.25, -1.5]] * len(output),
        output_top_logprobs_idx=[],
        output_token_ids_logprobs_val=None,
        output_token_ids_logprobs_idx=[],
        input_token_logprobs_val=[None, -0.5],
    )
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=ids,
        origin_input_ids_unpadded=ids,
        output_ids=array("q", output),
        full_untruncated_fill_ids=array("q", [*prompt, *output]),
        tokenizer=HANDLE,
        metrics_collector=HANDLE,
        time_stats=SimpleNamespace(metrics_collector=HANDLE, created=1.5),
        extra_key=None,
        cache_salt="salt",
        logprob=logprob,
        return_logprob=True,
        send_output_token_logprobs_offset=sent,
        **more,
    )


def test_a_request_comes_back_as_it_was_without_the_handles_of_its_process(tmp_path):
    reqs = [req("a", [5, 6, 7], [1, -2]), req("b", [2**40], [], decoded_text="x" * 13), req("c", [], [3])]
    values = [dict(vars(one.logprob)) for one in reqs]
    rows = bodies.write(reqs, {"a": 4, "c": 1}, tmp_path / "file")
    there = bodies.read(rows, 3, tmp_path / "file")
    known = [(u.rid, u.source, u.prompt, u.generated, u.kv_tokens, u.extra_key, u.cache_salt) for u in there]
    assert known == [("a", 3, 3, 2, 4, None, "salt"), ("b", 3, 1, 0, 0, None, "salt"), ("c", 3, 0, 1, 1, None, "salt")]
    assert [u.text.tolist() for u in there] == [[5, 6, 7, 1, -2], [2**40], [3]]
    for was, known, numbers in zip(reqs, there, values, strict=True):
        got = bodies.unpack(known)
        assert (got.origin_input_ids, got.output_ids) == (was.origin_input_ids, was.output_ids)
        assert got.origin_input_ids_unpadded is got.origin_input_ids  # as SGLang has it
        assert got.full_untruncated_fill_ids == array("q")  # from which SGLang fills it anew
        assert vars(got.logprob) == vars(was.logprob) == numbers
        assert (got.tokenizer, got.metrics_collector, got.time_stats.metrics_collector) == (None, None, None)
        assert got.time_stats.created == 1.5
    assert bodies.unpack(there[1]).decoded_text == "x" * 13


def test_who_needs_only_the_tokens_reads_no_body(tmp_path, monkeypatch):
    rows = bodies.write([req("a", [5, 6], [1])], {}, tmp_path / "file")
    monkeypatch.setattr(pickle, "loads", lambda _: pytest.fail("a body was read"))
    (one,) = bodies.read(rows, 0, tmp_path / "file")
    assert one.text.tolist() == [5, 6, 1]


def test_no_requests_are_no_file(tmp_path):
    assert bodies.write([], {}, tmp_path / "file") == []
    assert bodies.read([], 0, tmp_path / "file") == []
    assert not list(tmp_path.iterdir())


def test_log_probabilities_that_were_sent_do_not_travel_but_keep_their_place(tmp_path):
    long = req("a", [5], range(1, 3001), sent=2998)
    short = req("a", [5], range(1, 3001), sent=3000)
    (known,) = bodies.read(bodies.write([long], {}, tmp_path / "file"), 0, tmp_path / "file")
    got = bodies.unpack(known).logprob
    assert got.output_token_logprobs_val == [None] * 2998 + long.logprob.output_token_logprobs_val[2998:]
    assert got.output_top_logprobs_val == [None] * 2998 + [[-0.25, -1.5]] * 2
    assert (got.output_top_logprobs_idx, got.output_token_ids_logprobs_val) == ([], None)
    assert len(long.logprob.output_token_logprobs_val) == 3000  # nothing of the request itself is cut
    assert len(bodies.pack(long)) - len(bodies.pack(short)) < 200
    assert len(bodies.pack(long)) < 2000


def test_a_folder_without_room_is_named_and_nothing_is_left_in_it(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bodies, "pack", full)
    with pytest.raises(NoRoom, match=f"handover of 1 requests.*{tmp_path}.*shm-size"):
        bodies.write([req("a", [5], [1])], {}, tmp_path / "file")
    assert not list(tmp_path.iterdir())
