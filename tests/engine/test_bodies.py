"""Requests as bytes in shared memory: what is read is what was written, and only what is needed is read."""

import errno
import pickle
from array import array
from types import SimpleNamespace

import pytest

from pat.engine import bodies
from pat.engine.shared import NoRoom

HANDLE = open(__file__)  # noqa: SIM115  (cannot be pickled, like a tokenizer or a metrics collector)


def req(rid, prompt, output, **more):
    ids = array("q", prompt)
    logprob = SimpleNamespace(
        output_token_logprobs_val=[-0.1 * n for n in output],
        output_token_logprobs_idx=list(output),
        input_token_logprobs_val=[None, -0.5],
        output_top_logprobs_val=[[-0.25, -1.5]] * len(output),
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
        **more,
    )


def test_a_request_comes_back_as_it_was_without_the_handles_of_its_process(tmp_path):
    reqs = [req("a", [5, 6, 7], [1, -2]), req("b", [2**40], [], decoded_text="x" * 13), req("c", [], [3])]
    values = [list(one.logprob.output_token_logprobs_val) for one in reqs]
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
        assert vars(got.logprob) == vars(was.logprob)
        assert was.logprob.output_token_logprobs_val == numbers
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


@pytest.mark.parametrize("values", [[1.0, 2], [1, None], [True, 1], [], None, (1.0, 2.0)])
def test_only_numbers_of_one_kind_become_an_array(values):
    assert bodies._column(values) is None


def test_a_folder_without_room_is_named_and_nothing_is_left_in_it(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bodies, "pack", full)
    with pytest.raises(NoRoom, match=f"handover of 1 requests.*{tmp_path}.*shm-size"):
        bodies.write([req("a", [5], [1])], {}, tmp_path / "file")
    assert not list(tmp_path.iterdir())
