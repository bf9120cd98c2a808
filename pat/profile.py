"""Stage profile: time decode, prefill and switches in the real engine at every tensor-parallel size.

All sizes are visited in turn within each repeat, in an order that turns round with each, so that a drift of the
machine favours none of them. Every step that the engine makes on the way is a sample; the files hold raw samples, no
averages. A whole generation at each size, of unlike requests, is kept apart: the predictor is tested on it.

What has been measured stands in ``partial.jsonl`` until all is there: after an interruption the same command goes on
with what is missing, if machine, settings, model and code are still the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import polars as pl

from pat import provenance
from pat.config import SWITCHED_TOKENS
from pat.engine.cpu import processes
from pat.engine.trace import decode_steps, readmission_s
from pat.engine.transaction import PHASES
from pat.points import LEVELS, Decode, Generation, Point, Prefill, Rebalance, Switch, points, spread
from pat.resume import Partial, fingerprint

TOKENS_BEFORE_SWITCH = 10  # tokens that every request has generated when the first switch of a point happens
STEPS_AFTER_SWITCH = 5  # tokens between two switches of a point
PREFILLS, PREFILL_S = 12, 0.4  # a prefill is measured so often in a repeat, or as often as goes into so many seconds
POLL_S = 0.005
SETTLE_S = 0.03  # a rank notes its last step just after the answer has left it
CODE = ("layout.py", "seam.py", "profile.py", "points.py", "engine/**/*.py")  # samples of other code are not continued


def start_engine(cfg, experiment: Path, requests: int):
    """The engine of a configuration on the experiment's model, for up to ``requests`` requests a replica; no policy."""
    processes.warm()
    from pat.engine.api import Engine

    options = {
        "dtype": cfg.model.dtype,
        "skip_tokenizer_init": True,
        "max_running_requests": max(64, requests * cfg.ranks),
        "max_total_tokens": cfg.rollout.kv_tokens,
        "random_seed": cfg.seed,
        "log_level": "error",
    }
    model = str(experiment / "model")
    return Engine(model_path=model, ranks=cfg.ranks, tp_sizes=cfg.tp_sizes, **options | cfg.rollout.sglang)


def run(cfg, experiment: Path) -> None:
    """Write ``profile/{decode,prefill,switch,transfer,generation}.parquet`` and ``machine.json``.

    A line a point is printed.
    """
    out = experiment / "profile"
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    todo = [(repeat, point) for repeat in range(cfg.profile.repeats) for point in points(cfg, repeat)]
    partial = Partial(out / "partial.jsonl", fingerprint(cfg.model_dump_json(), experiment / "model", CODE))
    before_s = partial.seconds
    print(f"profile: starting SGLang on {cfg.ranks} ranks, then {len(todo)} points", flush=True)
    if partial.rows:
        print(f"profile: {len(partial.rows)} of them were measured before an interruption", flush=True)
    engine = start_engine(cfg, experiment, max(cfg.profile.batches))
    try:
        Sampler(engine, cfg).run(todo, partial)
    finally:
        engine.shutdown()
    for name, frame in tables(partial.rows.values()).items():
        frame.write_parquet(out / f"{name}.parquet")
    about = {"seconds": time.monotonic() - started + before_s, "hostname": socket.gethostname()}
    (out / "machine.json").write_text(json.dumps(about | provenance.facts(), indent=2) + "\n", encoding="utf-8")
    partial.path.unlink()


class Sampler:
    """Drives one engine through the points and keeps the samples."""

    def __init__(self, engine, cfg) -> None:
        self.engine, self.cfg = engine, cfg
        self.random = random.Random(cfg.seed)
        self.vocabulary = json.loads((Path(engine.server_args.model_path) / "config.json").read_text(encoding="utf-8"))[
            "vocab_size"
        ]
        self.switches: list[dict] = []  # of the present point

    def run(self, todo: list[tuple[int, Point]], partial: Partial) -> None:
        """All points in order that ``partial`` does not hold yet; each goes there as soon as it is measured."""
        self.engine.loop.run_until_complete(self._warm_up())
        todo = [(f"{repeat} {point}", repeat, point) for repeat, point in todo]
        missing = [each for each in todo if each[0] not in partial.rows]
        started = time.monotonic()
        for done, (key, repeat, point) in enumerate(missing, start=1):
            began, marks = time.monotonic(), self.engine.step_marks()
            self.switches = []
            self.engine.loop.run_until_complete(self._measure(point))
            steps = self.engine.steps(marks)
            sample = {
                "generation": isinstance(point, Generation),
                "repeat": repeat,
                "steps": steps.to_dict(as_series=False),
            }
            partial.add(key, sample | {"switches": self.switches}, time.monotonic() - began)
            left = (time.monotonic() - started) / done * (len(missing) - done)
            count = f"{len(todo) - len(missing) + done}/{len(todo)}"
            print(f"profile [{count}] {point}: {_brief(point, steps)}, {left:.0f} s left", flush=True)

    async def _warm_up(self) -> None:
        """First steps at each size allocate and start threads: not samples."""
        for tp in (*self.cfg.tp_sizes, min(self.cfg.tp_sizes)):
            await self.engine.async_switch(tp)
            await self._generate([self._prompt(16) for _ in range(self.cfg.ranks * 2)], 4)

    async def _measure(self, point: Point) -> None:
        await self.engine.async_switch(point.tp)
        replicas = self.engine.layout.dp
        if isinstance(point, Decode):
            # One prompt for all: its KV is computed once a replica, and decoding costs what it costs anyway.
            prompt = self._prompt(point.context)
            await self._generate([prompt] * replicas, 1)
            await self._generate([prompt] * (replicas * point.batch), self.cfg.profile.steps)
            await self._prefill(lambda: [prompt] * (replicas * point.batch), PREFILLS // 2)
        elif isinstance(point, Prefill):
            await self._prefill(
                lambda: [self._prompt(point.tokens) for _ in range(replicas * point.requests)], PREFILLS
            )
        elif isinstance(point, Generation):
            prompts = [self._prompt(tokens) for tokens in spread(point.prompt, point.requests, point.requests)]
            await self._generate(prompts, spread(point.response, point.requests, LEVELS)[::-1])
        elif isinstance(point, Rebalance):
            await self._measure_rebalance(point, replicas)
        else:
            await self._measure_switch(point)

    async def _prefill(self, prompts: Callable[[], list[list[int]]], times: int) -> None:
        """One token for each of ``prompts()``, several times: which of them share a step is up to when they arrive."""
        until = time.monotonic() + PREFILL_S
        for _ in range(times):
            await self._generate(prompts(), 1)
            if time.monotonic() > until:
                return

    async def _measure_switch(self, point: Switch) -> None:
        prompts = [self._prompt(point.context) for _ in range(point.requests)]
        generation = asyncio.ensure_future(self._generate(prompts, SWITCHED_TOKENS))
        await self._wait_for(point.requests, TOKENS_BEFORE_SWITCH, generation)
        for tp in (point.other, point.tp):
            marks = self.engine.step_marks()
            record = await self.engine.async_switch(tp, point.kv)
            await self._wait_for(point.requests, STEPS_AFTER_SWITCH, generation, more=True)
            self._keep_switch(record, marks)
        await generation

    async def _measure_rebalance(self, point: Rebalance, replicas: int) -> None:
        """Requests go to the replicas in turn: those of all but one end early."""
        prompts = [self._prompt(point.context) for _ in range(point.requests * replicas)]
        lengths = [1 if number % replicas else SWITCHED_TOKENS for number in range(len(prompts))]
        generation = asyncio.ensure_future(self._generate(prompts, lengths))
        await self._wait_for(point.requests, TOKENS_BEFORE_SWITCH, generation)
        marks = self.engine.step_marks()
        record = await self.engine.async_rebalance(point.kv)
        await self._wait_for(point.requests, STEPS_AFTER_SWITCH, generation, more=True)
        self._keep_switch(record, marks)
        await generation

    def _keep_switch(self, record: dict, marks: list[int]) -> None:
        if record["requests_moved"]:
            prefill_s = readmission_s(self.engine.steps(marks), record["end"])
            self.switches.append(record | {"live": None, "prefill_s": prefill_s})

    async def _wait_for(self, requests: int, generated: int, generation: asyncio.Future, more: bool = False) -> None:
        """Until each of the requests has that many tokens (``more``: than now), or they have ended."""
        before = None
        while not generation.done():
            tokens = {row[0]: row[2] for replica in self.engine.live_rows() for row in replica}
            if len(tokens) == requests:
                before = before or (tokens if more else dict.fromkeys(tokens, 0))
                if all(count >= before.get(key, 0) + generated for key, count in tokens.items()):
                    return
            await asyncio.sleep(POLL_S)

    def _prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(tokens)]

    async def _generate(self, prompts: list[list[int]], tokens: int | list[int]) -> None:
        """``tokens`` tokens for every prompt, or as many as each has in the list, sampled as in a rollout."""
        params = {"temperature": 1.0, "ignore_eos": True}
        lengths = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        work = [
            self.engine.async_generate(
                input_ids=prompt,
                sampling_params=params | {"sampling_seed": i, "max_new_tokens": length},
                return_logprob=True,
            )
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        await asyncio.wait_for(asyncio.gather(*work), self.engine.settings.deadline_s * 10)
        await asyncio.sleep(SETTLE_S)


def tables(samples: Iterable[dict[str, Any]]) -> dict[str, pl.DataFrame]:
    """The profile's tables by name, from what was measured at each point."""
    rows, switches, generations = [], [], []
    for sample in samples:
        if not sample["steps"]["start"]:
            continue
        steps = pl.DataFrame(sample["steps"]).with_columns(repeat=pl.lit(sample["repeat"], pl.Int64))
        (generations if sample["generation"] else rows).append(steps)
        switches += [switch | {"repeat": sample["repeat"]} for switch in sample["switches"]]
    decode, generation = (
        pl.concat([decode_steps(s).with_columns(repeat=s["repeat"][0]) for s in each]).drop("start", "rank")
        for each in (rows, generations)
    )
    prefill = (
        pl.concat(rows)
        .filter(pl.col("decode") == 0)
        .select(
            "tp",
            pl.col("batch").alias("requests"),
            "tokens",
            (pl.col("context") - pl.col("tokens")).alias("prefix"),
            "seconds",
            "repeat",
        )
    )
    switch = pl.DataFrame(
        [
            {
                "tp_from": s["tp_from"],
                "tp_to": s["tp_to"],
                "mode": s["kv"],
                "requests": s["requests_moved"],
                "kv_tokens": s["kv_tokens_moved"] + s["kv_tokens_recomputed"],
                **{f"{phase}_s": s[f"{phase}_s"] for phase in PHASES},
                "prefill_s": s["prefill_s"],
                "total_s": s["total_s"] + s["prefill_s"],
                "repeat": s["repeat"],
            }
            for s in switches
        ]
    )
    transfer = pl.DataFrame(
        [
            {
                "tp_from": s["tp_from"],
                "tp_to": s["tp_to"],
                "bytes": s["bytes_moved"],
                "requests": s["requests_moved"],
                "seconds": s["exchange_s"],
                "repeat": s["repeat"],
            }
            for s in switches
            if s["kv"] == "migrate"
        ]
    )
    return {
        "decode": decode,
        "prefill": prefill,
        "switch": switch,
        "transfer": transfer,
        "generation": generation,
    }


def _brief(point: Point, steps: pl.DataFrame) -> str:
    decode = isinstance(point, Decode | Generation)
    seconds = decode_steps(steps)["seconds"] if decode else steps.filter(pl.col("decode") == 0)["seconds"]
    return f"{(seconds.median() or 0) * 1e3:.1f} ms a step"
