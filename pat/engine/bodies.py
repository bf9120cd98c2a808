"""Requests as bytes in shared memory: written once by the leader of their old replica, read by those who go on.

Every rank maps the token ids, which decide what KV is shared; only the ranks of a request's new replica read the
rest. What is long does not travel number by number: token ids are copied as arrays, and log-probabilities that have
been sent to the user stay behind, since SGLang reads only what it has not sent yet.
"""

from __future__ import annotations

import copy
import errno
import pickle
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pat.engine.requests import Unfinished
from pat.engine.shared import NoRoom

WORD = 8  # bytes that each part of a file is aligned to
# Of SGLang's ReqLogprob: lists with an entry a generated token, read from ``send_output_token_logprobs_offset`` on.
SENT = (
    "output_token_logprobs_val",
    "output_token_logprobs_idx",
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    "output_token_ids_logprobs_val",
    "output_token_ids_logprobs_idx",
)


class Row(NamedTuple):
    """What is told of a request to all ranks. at: where in the file its token ids begin; body: bytes behind them."""

    rid: str
    prompt: int
    generated: int
    kv_tokens: int
    extra_key: str | None
    cache_salt: str | None
    at: int
    body: int


def write(reqs: list, kv_tokens: dict[str, int], path: Path) -> list[Row]:
    """Write the requests to ``path``, without the handles that belong to this process. Raises NoRoom."""
    rows: list[Row] = []
    if not reqs:
        return rows
    at = 0
    try:
        with open(path, "wb") as file:
            for req in reqs:
                text = array("q", req.origin_input_ids) + array("q", req.output_ids)
                body = pack(req)
                file.write(text.tobytes())
                file.write(body + bytes(-len(body) % WORD))
                lengths = (len(req.origin_input_ids), len(req.output_ids), kv_tokens.get(req.rid, 0))
                rows.append(Row(req.rid, *lengths, req.extra_key, req.cache_salt, at, len(body)))
                at += len(text) * WORD + len(body) + -len(body) % WORD
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        raise NoRoom(f"the handover of {len(reqs)} requests", at, [path.parent]) from error
    return rows


def read(rows: list[Row], source: int, path: Path) -> list[Unfinished]:
    """The requests of old replica ``source``; what they hold is mapped and not read yet."""
    if not rows:
        return []
    memory = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    found = []
    for row in rows:
        end = row.at + WORD * (row.prompt + row.generated)
        text, body = memory[row.at : end].view(np.int64), memory[end : end + row.body]
        found.append(Unfinished(row.rid, source, *row[1:6], text, body))
    return found


def pack(req) -> bytes:
    """All of ``req`` but its token ids, what can be derived from these, and log-probabilities that have been sent."""
    req.tokenizer = None
    req.metrics_collector = None
    if hasattr(req.time_stats, "metrics_collector"):
        req.time_stats.metrics_collector = None
    state = dict(vars(req))
    prompt = state.pop("origin_input_ids")
    del state["output_ids"]
    same = [name for name, value in state.items() if value is prompt]  # the ids before padding of images
    for name in same:
        del state[name]
    if isinstance(state.get("full_untruncated_fill_ids"), array):
        state["full_untruncated_fill_ids"] = array("q")  # SGLang fills it anew
    sent: dict[str, int] = {}
    if req.return_logprob:
        logprob = state["logprob"] = copy.copy(req.logprob)
        for name in SENT:
            values = getattr(logprob, name)
            if values:
                sent[name] = min(req.send_output_token_logprobs_offset, len(values))
                setattr(logprob, name, values[sent[name] :])
    return pickle.dumps((type(req), state, same, sent), protocol=5)


def unpack(request: Unfinished):
    """SGLang's Req as it was where it was written, without handles; None for each log-probability that was sent."""
    kind, state, same, sent = pickle.loads(request.body)
    req = kind.__new__(kind)
    vars(req).update(state)
    req.origin_input_ids, req.output_ids = array("q"), array("q")
    req.origin_input_ids.frombytes(request.text[: request.prompt].view(np.uint8))
    req.output_ids.frombytes(request.text[request.prompt :].view(np.uint8))
    for name in same:
        setattr(req, name, req.origin_input_ids)
    for name, count in sent.items():
        setattr(req.logprob, name, [None] * count + getattr(req.logprob, name))
    return req
