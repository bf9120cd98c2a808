"""``pat bench rollout``: generation stages with replayed lengths on the real engine, without training.

All workloads are replayed in each repeat, and in each of them all arms in turn, in an order that moves by one each
time, so that neither a drift of the machine nor what ran before favours one. The engine is the same for all arms: a
static arm is the Static policy. The arm pat knows of the lengths what it has learnt from the repeats before, a prior
in the first one. Each generation is simulated just before it, with the policy and at the pace of the machine as they
are then.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from pat.arms import from_config
from pat.bench_record import Record
from pat.engine.trace import decode_steps
from pat.policy import Policy
from pat.predictor import Predictor
from pat.predictor.latency import DecodeModel, PrefillModel
from pat.profile import start_engine
from pat.resume import fingerprint
from pat.simulate import Machine, Oracle, Requests, StageResult, simulate
from pat.workload import Replay, Workload

THRESHOLD_SHARE = 0.25  # the arm "threshold" goes to the widest size when so much of the batch is left
WARM_UP_TOKENS = 8
PACE_REQUESTS, PACE_TOKENS = 4, 32  # of a rank, and of a request: prompt and response
CODE = (
    *("layout.py", "arms.py", "policy.py", "predictive.py", "profile.py", "bench.py"),
    *("engine/**/*.py", "predictor/*.py", "simulate/*.py"),
)


def arms_of(cfg, predictor: Path, responses: int) -> dict[str, Policy]:
    """A fresh policy for every arm: each static size, a threshold, pat."""
    limits = {key: getattr(cfg.policy, key) for key in ("margin", "max_switch_share", "max_switches", "kv")}
    sizes = sorted(cfg.tp_sizes)
    arms = {f"tp{tp}": from_config(f"tp{tp}", sizes, limits, None) for tp in sizes}
    if len(sizes) > 1:
        arms["threshold"] = from_config(f"threshold{max(1, int(responses * THRESHOLD_SHARE))}", sizes, limits, None)
    return arms | {"pat": from_config("pat", sizes, limits, predictor)}


def rotated(arms: list[str], repeat: int) -> list[str]:
    """The order of the arms in a repeat."""
    start = repeat % len(arms)
    return arms[start:] + arms[:start]


def run(cfg, experiment: Path, workloads: Mapping[str, Workload], repeats: int, out: Path) -> None:
    """Write ``rollout.json``, ``rollout.html`` and ``steps.parquet`` to ``out``; a line a generation is printed.

    cfg: ranks, tp_sizes, seed, model, rollout, policy of a configuration. experiment: folder with ``model`` and
    ``predictor``, which an earlier run of the pipeline left. The files are written after every repeat of a workload;
    the same command goes on with what is missing in them, if settings, machine, model and code are the same.
    """
    vocabulary = json.loads((experiment / "model" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    predictor = experiment / "predictor" / "model.json"
    replays = [Replay.of(name, workload, vocabulary, cfg.seed) for name, workload in workloads.items()]
    same = fingerprint(cfg.model_dump_json(exclude={"train"}), experiment / "model", CODE, [predictor])
    record = Record(out, same, {"ranks": cfg.ranks, "model": cfg.model.source, "seed": cfg.seed})
    arms = {replay.name: arms_of(cfg, predictor, len(replay.lengths)) for replay in replays}
    done = {replay.name: record.add(replay, list(arms[replay.name])) for replay in replays}
    if min(done.values()) >= repeats:
        print(f"bench: {out / 'rollout.json'} has {repeats} repeats of each already", flush=True)
        record.write()
        return
    for replay in replays:  # what the policies have learnt in earlier repeats
        for policy in arms[replay.name].values():
            for _ in range(done[replay.name]):
                learn(policy, replay)
    machine = Machine(Predictor.load(predictor), cfg.ranks, tuple(cfg.tp_sizes), cfg.rollout.kv_tokens)
    print(f"bench: starting SGLang on {cfg.ranks} ranks", flush=True)
    engine = start_engine(cfg, experiment, max(len(replay.lengths) for replay in replays))
    try:
        bench = Bench(engine, machine, cfg.rollout.deadline_s)
        for replay in replays:
            bench.warm_up(replay, arms[replay.name])
        for repeat in range(min(done.values()), repeats):
            for replay in replays:
                if repeat >= done[replay.name]:
                    record.keep(replay.name, bench.run(replay, arms[replay.name], repeat))
                    record.write()
    finally:
        engine.shutdown()


def learn(policy: Policy, replay: Replay) -> None:
    """Show the policy the lengths of a generation, as after an iteration of training; the longest are cut ones."""
    policy.observe(replay.lengths, [length < replay.cap for length in replay.lengths])


@dataclass(frozen=True)
class Paced:
    """A latency model of a machine that takes ``pace`` times as long at each tp."""

    model: DecodeModel | PrefillModel
    pace: Mapping[int, float]

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        return self.model.tp_sizes

    def seconds(self, tp: int, *shape: np.ndarray) -> np.ndarray:
        return self.model.seconds(tp, *shape) * self.pace[tp]


class Bench:
    """Replays workloads on one engine, and in the simulator on ``machine``, which is what the engine runs on.

    A machine that others use as well is slower at one minute than at the next. So before each generation a short one
    of another shape tells its pace at each tp, realised over predicted, and that is what is simulated.
    """

    def __init__(self, engine, machine: Machine, deadline_s: float = 900.0) -> None:
        chunk = engine.server_args.chunked_prefill_size
        self.machine = replace(machine, prefill_tokens=chunk) if chunk and chunk > 0 else machine
        self.engine, self.deadline_s = engine, deadline_s

    def warm_up(self, replay: Replay, arms: Mapping[str, Policy]) -> None:
        """A few tokens in each arm allocate what a first time allocates; no policy learns from them."""
        for policy in arms.values():
            self.engine.loop.run_until_complete(self._generate(replay, deepcopy(policy), WARM_UP_TOKENS))

    def run(self, replay: Replay, arms: Mapping[str, Policy], repeat: int) -> dict:
        """One repeat: {"arms": {name: result of a generation}, "predicted": {name: seconds}, "oracle_s", "steps"}.

        A result has ``pace``, by tp, as it was just before.
        """
        # Samples of one prompt that are admitted to one prefill step do not find each other's KV, and all are here.
        requests = Requests.of(replay.lengths, [len(prompt) for prompt in replay.prompts], replay.cap)
        results, simulated, steps = {}, {}, []
        for name in rotated(list(arms), repeat):
            pace = self.engine.loop.run_until_complete(self._pace())
            simulated[name] = self._simulate(arms[name], requests, pace)
            result = self.engine.loop.run_until_complete(self._generate(replay, arms[name], replay.cap))
            learn(arms[name], replay)
            trace = result.pop("steps")
            about = {"workload": replay.name, "arm": name, "repeat": repeat}
            steps.append(trace.with_columns(*[pl.lit(value).alias(key) for key, value in about.items()]))
            results[name] = result | {"pace": {str(tp): ratio for tp, ratio in pace.items()}}
            print(
                f"bench {replay.name} [{repeat + 1}] {name}: {result['gen_s']:.2f} s, "
                f"simulated {simulated[name].seconds:.2f}"
                + "".join(f", {a} -> {b} at {n}" for a, b, n in result["switches"]),
                flush=True,
            )
        paces = [{int(tp): ratio for tp, ratio in result["pace"].items()} for result in results.values()]
        usual = self._paced({tp: statistics.median(pace[tp] for pace in paces) for tp in paces[0]})
        oracle = Oracle(usual, handed_in=list(simulated.values())).simulate(requests)
        return {
            "arms": results,
            "predicted": {name: result.seconds for name, result in simulated.items()},
            "oracle_s": oracle.seconds,
            "steps": pl.concat(steps),
        }

    def _simulate(self, policy: Policy, requests: Requests, pace: Mapping[int, float]) -> StageResult:
        return simulate(self._paced(pace), lambda: deepcopy(policy), requests)

    def _paced(self, pace: Mapping[int, float]) -> Machine:
        believed = self.machine.predictor
        paced = replace(believed, decode=Paced(believed.decode, pace), prefill=Paced(believed.prefill, pace))
        return replace(self.machine, predictor=paced)

    async def _pace(self) -> dict[int, float]:
        """Seconds of decode steps over what the predictor says, by tp."""
        engine, pace = self.engine, {}
        for tp in self.machine.tp_sizes:
            await engine.async_switch(tp)
            marks = engine.step_marks()
            prompts = [[number] * PACE_TOKENS for number in range(1, 1 + PACE_REQUESTS * self.machine.ranks)]
            await self._responses(prompts, [PACE_TOKENS] * len(prompts))
            steps = engine.steady_steps(marks)
            if not len(steps):
                raise RuntimeError(f"tp {tp} made no two decode steps in a row that are alike: no pace to measure")
            predicted = self.machine.predictor.decode.seconds(tp, steps["batch"], steps["context"])
            pace[tp] = float(steps["seconds"].sum() / predicted.sum())
        await engine.async_switch(engine.settings.base)
        return pace

    async def _responses(self, prompts: list[list[int]], lengths: list[int]) -> list[dict]:
        return await asyncio.gather(
            *[
                self.engine.async_generate(
                    input_ids=prompt,
                    sampling_params={
                        "temperature": 1.0,
                        "max_new_tokens": length,
                        "ignore_eos": True,
                        "sampling_seed": number,
                    },
                    return_logprob=True,
                )
                for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            ]
        )

    async def _generate(self, replay: Replay, policy: Policy, cap: int) -> dict:
        """One stage."""
        from pat.engine.controller import Controller

        engine = self.engine
        lengths = [min(length, cap) for length in replay.lengths]
        engine.max_new_tokens = cap
        engine.controller = controller = Controller(engine, policy)
        try:
            await engine.begin_iteration()
            first, marks = len(engine.switches), engine.step_marks()
            begin = time.monotonic()
            async with asyncio.timeout(self.deadline_s):
                outputs = await self._responses(replay.prompts, lengths)
            gen_s = time.monotonic() - begin
            live = engine.switches[first:]
            await engine.end_iteration()
        except TimeoutError as error:
            raise RuntimeError(
                f"workload {replay.name}: generation took longer than rollout.deadline_s = {self.deadline_s:.0f} s"
            ) from error
        finally:
            engine.controller = None
        got = [len(output["output_ids"]) for output in outputs]
        if got != lengths:
            raise RuntimeError(f"workload {replay.name}: asked for responses of {lengths} tokens, got {got}")
        return {
            "gen_s": gen_s,
            "switches": [(s["tp_from"], s["tp_to"], s["unfinished"]) for s in live if s["unfinished"]],
            "switch_s": sum(s["total_s"] for s in live),
            "decisions": len(controller.decision_s),
            "decision_s": sum(controller.decision_s),
            "steps": engine.steps(marks).with_columns(pl.col("start") - begin),
        }


def step_errors(decode, steps: pl.DataFrame) -> dict[str, dict]:
    """The predictor's errors on the decode steps of real generations, by tp, as in errors.json.

    decode: DecodeModel. steps: rows of steps.parquet. Of each shape (`decode_shapes`) the median step counts.
    """
    from pat.predictor.fit import generation_errors, summarise

    order = ["workload", "arm", "repeat", "rank", "start"]
    traces = [decode_steps(part) for _, part in steps.sort(order).group_by("workload", "arm", "repeat")]
    return summarise(generation_errors(decode, pl.concat(traces))) if traces else {}
