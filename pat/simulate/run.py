"""The simulate stage: every arm on the same lengths, and the oracle.

simulate/arms.parquet has a row for each arm and repeat:
    arm, repeat, gen_s (seconds of the stage), tokens, samples, switches and switch_s (mean of the nodes), tail_share
    (of the time, with at most 10 % of the requests live), start_tp (of the node that ends last),
    schedule: list of {node, at_s, tp_from, tp_to, unfinished, kv, cost_s, predicted_saving_s, predicted_cost_s},
    live: list of {at_s, live}, the unfinished requests from then on.
simulate/summary.json:
    {"arms": {ARM: {gen_s, tokens_per_s, tokens, samples, switches, switch_s, tail_share}},  medians of the repeats
     "spread": {ARM: [least, greatest gen_s]},
     "best_static": ARM, "worst_static": ARM, "default": ARM,  the last is the smallest tp
     "regret_pct": {ARM: ..},  100 * (gen_s / the oracle's - 1), median of the repeats
     "gain_pct": {"default": .., "worst_static": .., "best_static": .., "oracle": ..},  of pat, 100 * (1 - pat / it)
     "threshold": {"threshold": n, "threshold-best": n},  unfinished requests of a node
     "stage": {nodes, ranks, responses, samples, prompt, max_response, kv_tokens, history, repeats, seed}}
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import polars as pl
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pat.predictor import Predictor
from pat.simulate import arms as arm
from pat.simulate import lengths
from pat.simulate.machine import Machine, Requests
from pat.simulate.node import Switch
from pat.simulate.oracle import Oracle
from pat.simulate.stage import StageResult, simulate

METRICS = ("gen_s", "tokens", "samples", "switches", "switch_s", "tail_share")
SCHEDULE = pl.List(
    pl.Struct(
        dict(
            zip(
                Switch._fields,
                (pl.Int64, pl.Float64, pl.Int64, pl.Int64, pl.Int64, pl.String, *[pl.Float64] * 3),
                strict=True,
            )
        )
    )
)
SCHEMA = {
    "arm": pl.String, "repeat": pl.Int64, "gen_s": pl.Float64, "tokens": pl.Int64, "samples": pl.Int64,
    "switches": pl.Float64, "switch_s": pl.Float64, "tail_share": pl.Float64, "start_tp": pl.Int64,
    "schedule": SCHEDULE, "live": pl.List(pl.Struct({"at_s": pl.Float64, "live": pl.Int64})),
}  # fmt: skip


def run(cfg, predictor_path: Path, out_dir: Path) -> None:
    """Simulate by `cfg` (the settings that the stage reads) with the predictor; write arms.parquet, summary.json.

    FileNotFoundError without the predictor or the file of lengths, ValueError when a size or a switch was not
    profiled, or a request does not fit the KV capacity.
    """
    started = time.perf_counter()
    rollout, settings = cfg.rollout, cfg.simulate
    machine = Machine(
        Predictor.load(predictor_path), cfg.ranks, tuple(cfg.tp_sizes), settings.kv_tokens or rollout.kv_tokens
    )
    stage = {
        "nodes": settings.nodes or cfg.train.nodes,
        "ranks": cfg.ranks,
        "responses": settings.responses or rollout.prompts * rollout.samples,
        "samples": rollout.samples,
        "prompt": settings.prompt or max(rollout.max_prompt // 2, 1),
        "max_response": rollout.max_response,
        "kv_tokens": machine.kv_tokens,
        "history": settings.history,
        "repeats": settings.repeats,
        "seed": cfg.seed,
    }
    draw = lengths.from_config(settings.lengths, rollout.lengths, rollout.max_response)
    limits = {key: getattr(cfg.policy, key) for key in ("margin", "max_switch_share", "max_switches", "kv")}
    arms = arm.statics(machine) | {"pat": arm.pat(machine, limits)}
    if settings.ablations:
        arms |= arm.ablations(machine, limits, rollout.max_response)
    rows, thresholds = compare(machine, arms, stage, draw)
    frame = pl.DataFrame(rows, schema=SCHEMA)
    summary = summarise(frame, [f"tp{tp}" for tp in sorted(machine.tp_sizes)])
    summary |= {"threshold": thresholds, "stage": stage}
    out_dir.mkdir(parents=True, exist_ok=True)
    frame.write_parquet(out_dir / "arms.parquet")
    (out_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    Console().print(_table(summary))
    print(f"{settings.repeats} iterations of {stage['responses']} responses in {time.perf_counter() - started:.1f} s")


def compare(
    machine: Machine,
    arms: Mapping[str, arm.Arm],
    stage: Mapping[str, int],
    draw: Callable[[np.random.Generator, int], np.ndarray],
) -> tuple[list[dict], dict[str, int]]:
    """The rows of arms.parquet, of every arm, the thresholds and the oracle, and the thresholds' numbers.

    The repeats differ in their lengths, drawn by the stage's seed; all arms of a repeat have the same ones.
    """
    nodes, count, cap = stage["nodes"], stage["responses"], stage["max_response"]
    of_node = -(-count // nodes)
    sweep = arm.threshold_sweep(of_node)
    found: dict[str, list[StageResult]] = {}
    with Progress(transient=True) as progress:
        task = progress.add_task("Simulating", total=stage["repeats"] * (len(arms) + len(sweep) + 1))
        for repeat in range(stage["repeats"]):
            rng = np.random.default_rng([stage["seed"], repeat])
            history = [draw(rng, count) for _ in range(stage["history"])]
            requests = Requests.of(draw(rng, count), stage["prompt"], cap, stage["samples"])
            tried = arms | {f"threshold-{n}": arm.threshold(machine, n) for n in sweep}
            results = []
            for name, make in tried.items():
                policies = iter(
                    [make([(h[node::nodes], h[node::nodes] < cap) for h in history]) for node in range(nodes)]
                )
                result = simulate(machine, lambda policies=policies: next(policies), requests, nodes)
                found.setdefault(name, []).append(result)
                results.append(result)
                progress.advance(task)
            oracle = Oracle(machine, handed_in=results).simulate(requests, nodes)
            found.setdefault("oracle", []).append(oracle)
            progress.advance(task)
    return _rows(found, sweep, max(of_node // 8, 1))


def _rows(found: Mapping[str, list[StageResult]], sweep: list[int], default: int) -> tuple[list[dict], dict[str, int]]:
    """Of the thresholds only the default and the best one are kept, named so."""
    chosen = {
        "threshold": min(sweep, key=lambda n: abs(n - default)),
        "threshold-best": min(sweep, key=lambda n: np.median([r.seconds for r in found[f"threshold-{n}"]])),
    }
    kept = {name: results for name, results in found.items() if not name.startswith("threshold-")}
    kept |= {name: found[f"threshold-{n}"] for name, n in chosen.items()}
    return [row(name, i, each) for name, results in kept.items() for i, each in enumerate(results)], chosen


def row(name: str, repeat: int, result: StageResult) -> dict:
    """A row of arms.parquet."""
    nodes, switches = len(result.nodes), result.switches
    return {
        "arm": name,
        "repeat": repeat,
        "gen_s": result.seconds,
        "tokens": result.tokens,
        "samples": result.samples,
        "switches": len(switches) / nodes,
        "switch_s": sum(switch.cost_s for switch in switches) / nodes,
        "tail_share": result.tail_share,
        "start_tp": max(result.nodes, key=lambda node: node.seconds).start_tp,
        "schedule": [switch._asdict() for switch in switches],
        "live": [{"at_s": float(at), "live": int(n)} for at, n in zip(*result.live_curve(), strict=True)],
    }


def summarise(frame: pl.DataFrame, statics: Iterable[str]) -> dict:
    """summary.json without the sections `threshold` and `stage`, from the rows of arms.parquet."""
    arms = {}
    for (name,), rows in frame.group_by("arm", maintain_order=True):
        arms[name] = {metric: rows[metric].median() for metric in METRICS}
        arms[name]["tokens_per_s"] = (rows["tokens"] / rows["gen_s"]).median()
    spread = {
        name: [rows["gen_s"].min(), rows["gen_s"].max()] for (name,), rows in frame.group_by("arm", maintain_order=True)
    }
    limit = frame.filter(arm="oracle").select("repeat", limit="gen_s")
    regret = frame.join(limit, on="repeat").group_by("arm", maintain_order=True)
    by_time = sorted(statics, key=lambda name: arms[name]["gen_s"])
    references = {"default": next(iter(statics)), "worst_static": by_time[-1], "best_static": by_time[0]}
    gains = {
        role: 100 * (1 - arms["pat"]["gen_s"] / arms[name]["gen_s"])
        for role, name in (references | {"oracle": "oracle"}).items()
    }
    return {
        "arms": arms,
        "spread": spread,
        **references,
        "regret_pct": dict(regret.agg(100 * (pl.col("gen_s") / pl.col("limit") - 1).median()).rows()),
        "gain_pct": gains,
    }


def _table(summary: dict) -> Table:
    table = Table(title="Simulated generation stage, medians")
    for column in ("arm", "seconds", "tokens/s", "switches", "switching, s", "tail, %", "over the oracle, %"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, values in sorted(summary["arms"].items(), key=lambda each: each[1]["gen_s"]):
        note = f" ({summary['threshold'][name]})" if name in summary["threshold"] else ""
        table.add_row(
            name + note,
            f"{values['gen_s']:.2f}",
            f"{values['tokens_per_s']:.0f}",
            f"{values['switches']:.2f}",
            f"{values['switch_s']:.2f}",
            f"{100 * values['tail_share']:.0f}",
            f"{summary['regret_pct'][name]:.2f}",
        )
    return table
