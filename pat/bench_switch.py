"""``pat bench switch``: the host's work for unfinished requests at a switch, and for the board at each step.

SGLang's own request objects, with log-probabilities, go through the engine's own functions in this one process, without
a model: what each rank does with them in Python is what a GPU does not make faster.
"""

from __future__ import annotations

import json
import pickle
import shutil
import time
from array import array
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from rich.console import Console
from rich.table import Table

from pat import provenance
from pat.engine import sglang_api as sg
from pat.engine.board import Board, board_bytes
from pat.engine.cpu import environment, stand_ins
from pat.engine.shared import shared_folder
from pat.layout import Layout

VOCABULARY = 32_000
UNSENT = 20  # tokens of a request whose log-probabilities have not been sent yet: SGLang sends every 50
LIVE_STEPS = 100


def make(requests: int, prompt: int, generated: int, samples: int = 8, seed: int = 0) -> list:
    """SGLang's Reqs in the middle of their generation; ``samples`` of them share each prompt."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(requests):
        if number % samples == 0:
            text = array("q", rng.integers(0, VOCABULARY, prompt).tolist())
        req = sg.Req(
            f"request-{number}", "", text, sg.SamplingParams(max_new_tokens=2 * generated), return_logprob=True
        )
        req.output_ids = array("q", rng.integers(0, VOCABULARY, generated).tolist())
        req.refresh_fill_ids()
        req.logprob.output_token_logprobs_val = rng.random(generated).tolist()
        req.logprob.output_token_logprobs_idx = req.output_ids.tolist()
        req.send_output_token_logprobs_offset = max(0, generated - UNSENT)
        made.append(req)
    return made


def switch(reqs: list, layouts: tuple[Layout, Layout], folder: Path) -> dict[str, float]:
    """Seconds of each part of a switch on the busiest rank, as the phases of a switch have them.

    write: the requests of one old replica, by its leader. share: what is told of all of them. place: all of them are
    dealt, and what they share is found. take: those of one new replica. Raises NoRoom.
    """
    from pat.engine import bodies
    from pat.engine.requests import place
    from pat.engine.resume import adopt

    old, new = layouts
    seconds: dict[str, float] = {}
    timed = _clock(seconds)
    dealt = [reqs[replica :: old.dp] for replica in range(old.dp)]
    rows = []
    for replica, of_replica in enumerate(dealt):
        kv_tokens = {req.rid: len(req.origin_input_ids) + len(req.output_ids) - 1 for req in of_replica}
        with timed("write"):
            rows.append(bodies.write(of_replica, kv_tokens, folder / f"requests.{replica}"))
    with timed("share"):
        told = pickle.loads(pickle.dumps(rows))
    with timed("place"):
        known = [r for n, one in enumerate(told) for r in bodies.read(one, n, folder / f"requests.{n}")]
        placed = place(known, new.dp, tokens=1 << 40, rows=1 << 20, sharing=True)
    scheduler = SimpleNamespace(
        tokenizer=None, metrics_collector=None, metrics_reporter=SimpleNamespace(enable_metrics=False)
    )
    for replica in range(new.dp):
        with timed("take"):
            for item in placed:
                if item.target == replica:
                    adopt(scheduler, bodies.unpack(item.request))
    return seconds


def live(reqs: list, folder: Path) -> dict[str, float]:
    """Median seconds of a step's live list: with the requests of the step before, and after one of them has ended."""
    from pat.engine.live import LiveList

    shown = LiveList(Board.create(folder, 0))
    shown.show(reqs)
    same, ended = [], []
    left = list(reqs)
    for _ in range(LIVE_STEPS):
        same.append(_seconds(lambda: shown.show(left)))
        if len(left) > 1:
            left.pop(len(left) // 2).finished_reason = "bench"
            ended.append(_seconds(lambda: shown.show(left)))
    return {"same": float(np.median(same)), "ended": float(np.median(ended or same))}


def run(requests: int, tokens: int, ranks: int, sizes: tuple[int, int], out: Path) -> None:
    """Write ``switch.json`` to ``out`` and print it. tokens: of each request, an eighth of them its prompt."""
    environment.prepare()
    if not environment.has_accelerator():
        stand_ins.add()
    layouts = Layout(ranks, sizes[0]), Layout(ranks, sizes[1])
    prompt = tokens // 8
    reqs = make(requests, prompt, tokens - prompt)
    folder = shared_folder("bench", board_bytes() + 16 * requests * (tokens + 4096))
    try:
        parts = switch(reqs, layouts, folder)
        step = live(reqs, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    total = sum(parts.values())
    document = {
        "requests": requests,
        "tokens": tokens,
        "ranks": ranks,
        "tp_from": sizes[0],
        "tp_to": sizes[1],
        "seconds": parts | {"total": total},
        "seconds_a_request": total / requests,
        "live_list_s": step,
    } | provenance.facts()
    out.mkdir(parents=True, exist_ok=True)
    (out / "switch.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    Console(width=120).print(_table(document))


def _table(found: dict) -> Table:
    table = Table(
        title=f"Host work of a switch from tp {found['tp_from']} to tp {found['tp_to']} on {found['ranks']} ranks: "
        f"{found['requests']} requests of {found['tokens']} tokens"
    )
    table.add_column("part")
    table.add_column("seconds", justify="right")
    table.add_column("us a request", justify="right")
    for name, seconds in found["seconds"].items():
        table.add_row(name, f"{seconds:.4f}", f"{1e6 * seconds / found['requests']:.1f}")
    for name, seconds in found["live_list_s"].items():
        table.add_row(f"live list a step, {name}", f"{seconds:.6f}", f"{1e6 * seconds / found['requests']:.3f}")
    return table


def _clock(seconds: dict[str, float]) -> Callable:
    """A context that keeps the longest time of each name: ranks do their parts at the same time."""

    @contextmanager
    def timed(name: str):
        begin = time.perf_counter()
        yield
        seconds[name] = max(seconds.get(name, 0.0), time.perf_counter() - begin)

    return timed


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
