"""Stage profile: time decode, prefill and switches in the real engine at every tensor-parallel size.

All sizes are visited in turn within each repeat, so that a drift of the machine favours none of them. Every step
that the engine makes on the way is a sample; the files hold raw samples, no averages.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from pat import provenance
from pat.config import SWITCHED_TOKENS
from pat.engine.cpu import processes
from pat.engine.trace import decode_steps, readmission_s
from pat.engine.transaction import PHASES

TOKEN_BEFORE_SWITCH = 2  # tokens that every request has generated when a measured switch happens
STEPS_AFTER_SWITCH = 3  # tokens between two switches of a point
POLL_S = 0.005
SETTLE_S = 0.03  # a rank notes its last step just after the answer has left it


@dataclass(frozen=True)
class Decode:
    """``batch`` requests a replica with ``context`` tokens in KV each."""

    tp: int
    batch: int
    context: int

    def __str__(self) -> str:
        return f"tp{self.tp} decode, batch {self.batch}, context {self.context}"


@dataclass(frozen=True)
class Prefill:
    """``requests`` fresh prompts of ``tokens`` tokens on each replica."""

    tp: int
    requests: int
    tokens: int

    def __str__(self) -> str:
        return f"tp{self.tp} prefill, {self.requests} x {self.tokens} tokens"


@dataclass(frozen=True)
class Switch:
    """From ``tp`` to ``other`` and back with ``requests`` unfinished requests of ``context`` tokens."""

    tp: int
    other: int
    requests: int
    context: int
    kv: str

    def __str__(self) -> str:
        return f"tp{self.tp} <-> tp{self.other}, {self.requests} requests of {self.context} tokens, {self.kv}"


def points(cfg) -> Iterator[Decode | Prefill | Switch]:
    """One repeat of what is measured. A wider replica also gets the batch that it has when all are merged."""
    batches, contexts = sorted(cfg.profile.batches), sorted(cfg.profile.contexts)
    for context in contexts:
        for batch in batches:
            for tp in cfg.tp_sizes:
                yield Decode(tp, batch, context)
        for tp in cfg.tp_sizes:
            if tp > 1:
                yield Decode(tp, batches[-1] * tp, context)
    for tokens in cfg.profile.prefill:
        for tp in cfg.tp_sizes:
            yield Prefill(tp, 1, tokens)
    for tp in cfg.tp_sizes:
        yield Prefill(tp, min(4, batches[-1]), min(cfg.profile.prefill))
    sizes = {(batches[0], contexts[0]), (min(4, batches[-1]), contexts[-1]), (batches[-1], contexts[0])}
    for a, b in [(a, b) for a in cfg.tp_sizes for b in cfg.tp_sizes if a < b]:
        for requests, context in sorted(sizes):
            for kv in ("migrate", "recompute"):
                yield Switch(a, b, requests, context, kv)


def start_engine(cfg, experiment: Path, requests: int):
    """The engine of a configuration on the experiment's model, for up to ``requests`` requests a replica; no policy."""
    processes.warm()
    from pat.engine.api import Engine

    return Engine(
        model_path=str(experiment / "model"),
        ranks=cfg.ranks,
        tp_sizes=cfg.tp_sizes,
        dtype=cfg.model.dtype,
        skip_tokenizer_init=True,
        max_running_requests=max(64, requests * cfg.ranks),
        max_total_tokens=cfg.rollout.kv_tokens,
        random_seed=cfg.seed,
        log_level="error",
    )


def run(cfg, experiment: Path) -> None:
    """Write ``profile/{decode,prefill,switch,transfer}.parquet`` and ``machine.json``; a line a point is printed."""
    out = experiment / "profile"
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    todo = [(repeat, point) for repeat in range(cfg.profile.repeats) for point in points(cfg)]
    print(f"profile: starting SGLang on {cfg.ranks} ranks, then {len(todo)} points", flush=True)
    engine = start_engine(cfg, experiment, max(cfg.profile.batches))
    try:
        samples = Sampler(engine, cfg).run(todo)
    finally:
        engine.shutdown()
    for name, frame in samples.items():
        frame.write_parquet(out / f"{name}.parquet")
    about = {"seconds": time.monotonic() - started, "hostname": socket.gethostname()}
    (out / "machine.json").write_text(json.dumps(about | provenance.facts(), indent=2) + "\n")


class Sampler:
    """Drives one engine through the points and keeps the samples."""

    def __init__(self, engine, cfg) -> None:
        self.engine, self.cfg = engine, cfg
        self.random = random.Random(cfg.seed)
        self.vocabulary = json.loads((Path(engine.server_args.model_path) / "config.json").read_text())["vocab_size"]
        self.steps: list[pl.DataFrame] = []
        self.switches: list[dict] = []

    def run(self, todo: list[tuple[int, Decode | Prefill | Switch]]) -> dict[str, pl.DataFrame]:
        """All points in order; returns the tables decode, prefill, switch and transfer."""
        self.engine.loop.run_until_complete(self._warm_up())
        started = time.monotonic()
        for done, (repeat, point) in enumerate(todo):
            marks = self.engine.step_marks()
            self.engine.loop.run_until_complete(self._measure(point, repeat))
            steps = self.engine.steps(marks)
            self.steps.append(steps.with_columns(repeat=pl.lit(repeat, pl.Int64)))
            left = (time.monotonic() - started) / (done + 1) * (len(todo) - done - 1)
            print(
                f"profile [{done + 1}/{len(todo)}] {point}: {_brief(point, steps)}, {left:.0f} s left",
                flush=True,
            )
        return self._tables()

    async def _warm_up(self) -> None:
        """First steps at each size allocate and start threads: not samples."""
        for tp in (*self.cfg.tp_sizes, min(self.cfg.tp_sizes)):
            await self.engine.async_switch(tp)
            await self._generate([self._prompt(16) for _ in range(self.cfg.ranks * 2)], 4)

    async def _measure(self, point: Decode | Prefill | Switch, repeat: int) -> None:
        await self.engine.async_switch(point.tp)
        replicas = self.engine.layout.dp
        if isinstance(point, Decode):
            # One prompt for all: its KV is computed once a replica, and decoding costs what it costs anyway.
            prompt = self._prompt(point.context)
            await self._generate([prompt] * replicas, 1)
            await self._generate([prompt] * (replicas * point.batch), self.cfg.profile.steps)
        elif isinstance(point, Prefill):
            await self._generate([self._prompt(point.tokens) for _ in range(replicas * point.requests)], 1)
        else:
            await self._measure_switch(point, repeat)

    async def _measure_switch(self, point: Switch, repeat: int) -> None:
        prompts = [self._prompt(point.context) for _ in range(point.requests)]
        generation = asyncio.ensure_future(self._generate(prompts, SWITCHED_TOKENS))
        for tp, back in ((point.other, 2), (point.tp, 3)):
            await self._wait_for(point.requests, back * (TOKEN_BEFORE_SWITCH + STEPS_AFTER_SWITCH), generation)
            marks = self.engine.step_marks()
            record = await self.engine.async_switch(tp, point.kv)
            await self._wait_for(point.requests, (back + 1) * (TOKEN_BEFORE_SWITCH + STEPS_AFTER_SWITCH), generation)
            if record["unfinished"]:
                prefill_s = readmission_s(self.engine.steps(marks), record["end"])
                self.switches.append(record | {"repeat": repeat, "prefill_s": prefill_s})
        await generation

    async def _wait_for(self, requests: int, generated: int, generation: asyncio.Future) -> None:
        """Until all requests decode and each has that many tokens, or they have ended."""
        while not generation.done():
            rows = [row for replica in self.engine.live_rows() for row in replica]
            if len(rows) == requests and min(row[2] for row in rows) >= generated:
                return
            await asyncio.sleep(POLL_S)

    def _prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(tokens)]

    async def _generate(self, prompts: list[list[int]], tokens: int) -> None:
        """``tokens`` tokens for every prompt, sampled as in a rollout."""
        params = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
        work = [
            self.engine.async_generate(
                input_ids=prompt, sampling_params=params | {"sampling_seed": i}, return_logprob=True
            )
            for i, prompt in enumerate(prompts)
        ]
        await asyncio.wait_for(asyncio.gather(*work), self.engine.settings.deadline_s * 10)
        await asyncio.sleep(SETTLE_S)

    def _tables(self) -> dict[str, pl.DataFrame]:
        decode = pl.concat([decode_steps(s).with_columns(repeat=s["repeat"][0]) for s in self.steps if len(s)])
        prefill = (
            pl.concat(self.steps)
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
                    "requests": s["unfinished"],
                    "kv_tokens": s["kv_tokens_moved"] + s["kv_tokens_recomputed"],
                    **{f"{phase}_s": s[f"{phase}_s"] for phase in PHASES},
                    "prefill_s": s["prefill_s"],
                    "total_s": s["total_s"] + s["prefill_s"],
                    "repeat": s["repeat"],
                }
                for s in self.switches
            ]
        )
        transfer = pl.DataFrame(
            [
                {
                    "tp_from": s["tp_from"],
                    "tp_to": s["tp_to"],
                    "bytes": s["bytes_moved"],
                    "requests": s["unfinished"],
                    "seconds": s["exchange_s"],
                    "repeat": s["repeat"],
                }
                for s in self.switches
                if s["kv"] == "migrate"
            ]
        )
        return {
            "decode": decode.drop("start", "rank"),
            "prefill": prefill,
            "switch": switch,
            "transfer": transfer,
        }


def _brief(point: Decode | Prefill | Switch, steps: pl.DataFrame) -> str:
    decode = isinstance(point, Decode)
    seconds = decode_steps(steps)["seconds"] if decode else steps.filter(pl.col("decode") == 0)["seconds"]
    return f"{(seconds.median() or 0) * 1e3:.1f} ms a step"
