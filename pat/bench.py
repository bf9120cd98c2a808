"""``pat bench rollout``: generation stages with replayed lengths on the real engine, without training.

All arms run in turn within each repeat, in an order that moves by one each time, so that neither a drift of the
machine nor what ran before favours one. The engine is the same for all arms: a static arm is the Static policy.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pat import policy as policies
from pat import provenance
from pat.profile import start_engine
from pat.workload import Replay, Workload

THRESHOLD_SHARE = 0.25  # the arm "threshold" goes to the widest size when so much of the batch is left


def arms_of(cfg, predictor: Path, responses: int) -> dict[str, policies.Policy]:
    """A fresh policy for every arm: each static size, a threshold, pat."""
    limits = {key: getattr(cfg.policy, key) for key in ("margin", "max_switch_share", "max_switches", "kv")}
    sizes = sorted(cfg.tp_sizes)
    arms = {f"tp{tp}": policies.from_config(f"tp{tp}", sizes, limits, None) for tp in sizes}
    if len(sizes) > 1:
        arms["threshold"] = policies.Threshold(sizes[-1], max(1, int(responses * THRESHOLD_SHARE)))
    return arms | {"pat": policies.from_config("pat", sizes, limits, predictor)}


def rotated(arms: list[str], repeat: int) -> list[str]:
    """The order of the arms in a repeat."""
    start = repeat % len(arms)
    return arms[start:] + arms[:start]


def run(cfg, experiment: Path, workloads: Mapping[str, Workload], repeats: int, out: Path) -> None:
    """Write ``rollout.json`` and ``rollout.html`` to ``out``; a line a generation is printed.

    cfg: ranks, tp_sizes, seed, model, rollout, policy of a configuration. experiment: folder with ``model`` and
    ``predictor``, which an earlier run of the pipeline left.
    """
    vocabulary = json.loads((experiment / "model" / "config.json").read_text())["vocab_size"]
    replays = [Replay.of(name, workload, vocabulary, cfg.seed) for name, workload in workloads.items()]
    out.mkdir(parents=True, exist_ok=True)
    print(f"bench: starting SGLang on {cfg.ranks} ranks", flush=True)
    engine = start_engine(cfg, experiment, max(len(replay.lengths) for replay in replays))
    results = {}
    try:
        bench = Bench(engine, lambda responses: arms_of(cfg, experiment / "predictor" / "model.json", responses))
        for replay in replays:
            results[replay.name] = bench.run(replay, repeats)
            _write(out, results, cfg, repeats)  # after each: a long run that is ended leaves what it has
    finally:
        engine.shutdown()


class Bench:
    """Replays workloads on one engine. arms: fresh policies for a number of responses."""

    def __init__(self, engine, arms: Callable[[int], dict[str, policies.Policy]]) -> None:
        self.engine, self.arms = engine, arms

    def run(self, replay: Replay, repeats: int) -> dict:
        """{"about", "lengths", "arms": {name: {"gen_s": [..], "median", "switches", "switch_s"}}} of one workload."""
        arms = self.arms(len(replay.lengths))
        loop = self.engine.loop
        for arm in arms.values():  # what a first time allocates
            loop.run_until_complete(self._generate(replay, arm, cap=8))
        kept: dict[str, list[dict]] = {name: [] for name in arms}
        for repeat in range(repeats):
            for name in rotated(list(arms), repeat):
                result = loop.run_until_complete(self._generate(replay, arms[name], replay.cap))
                kept[name].append(result)
                print(
                    f"bench {replay.name} [{repeat + 1}/{repeats}] {name}: {result['gen_s']:.2f} s"
                    + "".join(f", {a} -> {b} at {n}" for a, b, n in result["switches"]),
                    flush=True,
                )
        return {
            "about": replay.about,
            "lengths": replay.lengths,
            "arms": {
                name: {
                    "gen_s": [result["gen_s"] for result in results],
                    "median": statistics.median(result["gen_s"] for result in results),
                    "switches": [result["switches"] for result in results],
                    "switch_s": [result["switch_s"] for result in results],
                }
                for name, results in kept.items()
            },
        }

    async def _generate(self, replay: Replay, policy: policies.Policy, cap: int) -> dict:
        """One stage. The policy learns the lengths afterwards, as from an iteration of training."""
        from pat.engine.controller import Controller

        engine = self.engine
        lengths = [min(length, cap) for length in replay.lengths]
        engine.max_new_tokens = cap
        engine.controller = Controller(engine, policy)
        before = len(engine.switches)
        try:
            await engine.begin_iteration()
            first = len(engine.switches)
            begin = time.monotonic()
            outputs = await asyncio.gather(
                *[
                    engine.async_generate(
                        input_ids=prompt,
                        sampling_params={
                            "temperature": 1.0,
                            "max_new_tokens": length,
                            "ignore_eos": True,
                            "sampling_seed": number,
                        },
                        return_logprob=True,
                    )
                    for number, (prompt, length) in enumerate(zip(replay.prompts, lengths, strict=True))
                ]
            )
            gen_s = time.monotonic() - begin
            live = engine.switches[first:]
            await engine.end_iteration()
        finally:
            engine.controller = None
        got = [len(output["output_ids"]) for output in outputs]
        if got != lengths:
            raise RuntimeError(f"workload {replay.name}: asked for responses of {lengths} tokens, got {got}")
        if cap == replay.cap:
            policy.observe(lengths, [length < cap for length in lengths])
        return {
            "gen_s": gen_s,
            "switches": [(s["tp_from"], s["tp_to"], s["unfinished"]) for s in live if s["unfinished"]],
            "switch_s": sum(s["total_s"] for s in live),
            "set_up": first - before,
        }


def _write(out: Path, results: dict, cfg, repeats: int) -> None:
    from pat.report.bench import page

    about = {"repeats": repeats, "ranks": cfg.ranks, "model": cfg.model.source, "seed": cfg.seed}
    document = {"workloads": results, "about": about | provenance.facts()}
    for name, text in (("rollout.json", json.dumps(document, indent=2) + "\n"), ("rollout.html", page(document))):
        partial = out / f"{name}.part"
        partial.write_text(text)
        partial.rename(out / name)
