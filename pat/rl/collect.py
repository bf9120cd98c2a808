"""What an arm's generations and verl's metrics say, as Parquet (schemas: REQUESTS, SWITCHES, ITERATIONS)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pat.engine.trace import decode_steps, readmission_s
from pat.engine.transaction import PHASES
from pat.predictor import Predictor
from pat.predictor.remaining import drain
from pat.rl.iteration import COUNTED, IterationError
from pat.rl.verl_log import verl_lines

TAIL_SHARE = 0.1  # the tail of a generation: at most this share of its requests is alive

# server: the replica of verl, one a node, whose ranks PAT groups. Times are seconds since the first request of the
# iteration on any server.
REQUESTS = {
    "iteration": pl.Int64,
    "server": pl.Int64,
    "request": pl.Int64,
    "prompt_tokens": pl.Int64,
    "response_tokens": pl.Int64,
    "finish_reason": pl.String,
    "seed": pl.Int64,
    "arrive_s": pl.Float64,
    "finish_s": pl.Float64,
}
SWITCHES = {
    "iteration": pl.Int64,
    "server": pl.Int64,
    "switch": pl.Int64,
    "tp_from": pl.Int64,
    "tp_to": pl.Int64,
    "kv": pl.String,
    "at_s": pl.Float64,
    "unfinished": pl.Int64,
    "kv_tokens_moved": pl.Int64,
    "kv_tokens_recomputed": pl.Int64,
    "bytes_moved": pl.Int64,
    **{f"{phase}_s": pl.Float64 for phase in PHASES},
    "prefill_s": pl.Float64,
    "total_s": pl.Float64,
    "predicted_saving_s": pl.Float64,
    "predicted_cost_s": pl.Float64,
    "realised_saving_s": pl.Float64,
}
ITERATIONS = {
    "iteration": pl.Int64,
    "gen_s": pl.Float64,
    "iteration_s": pl.Float64,
    "update_s": pl.Float64,
    "old_log_prob_s": pl.Float64,
    "weight_sync_s": pl.Float64,
    "reward_s": pl.Float64,
    "tokens": pl.Int64,
    "samples": pl.Int64,
    "truncated": pl.Int64,
    "reward_mean": pl.Float64,
    "response_len_mean": pl.Float64,
    "response_len_max": pl.Int64,
    "switches": pl.Int64,
    "switch_s": pl.Float64,
    "prob_diff_max": pl.Float64,
    "tail_s": pl.Float64,
    "decision_s": pl.Float64,
    "save_s": pl.Float64,
    "warm_up": pl.Boolean,
}
# samples: those that were trained on.
# switch_s, decision_s: of the server that took longest. save_s: of a checkpoint, which iteration_s leaves out.
# warm_up: the first after a start of verl.
# Column of iterations.parquet -> metric of verl 0.9.1
VERL_METRICS = {
    "gen_s": "timing_s/gen",
    "iteration_s": "timing_s/step",
    "update_s": "timing_s/update_actor",
    "old_log_prob_s": "timing_s/old_log_prob",
    "weight_sync_s": "timing_s/update_weights",
    "reward_s": "timing_s/reward",
    "save_s": "timing_s/save_checkpoint",
    "samples": COUNTED,
    "reward_mean": "critic/rewards/mean",
    "prob_diff_max": "training/rollout_probs_diff_max",
}


def generations(out: Path) -> list[dict[str, Any]]:
    """The records that the servers have written so far, by iteration and server."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted((out / "rollout").glob("*.json"))]


def describe(generation: dict[str, Any]) -> str:
    """One generation in a line."""
    requests, live = generation["requests"], [s for s in generation["switches"] if s["unfinished"]]
    seconds = max(r["finish"] for r in requests) - _begin([generation])
    tokens = sum(r["response_tokens"] for r in requests)
    text = f"generated {tokens} tokens in {seconds:.1f} s, {len(requests)} responses"
    for s in live:
        text += f"; tp{s['tp_from']} -> tp{s['tp_to']} at {s['unfinished']} unfinished in {s['total_s']:.2f} s"
    return text


def write(out: Path, predictor: Path | None, samples: int, starts: Collection[int] = (0,)) -> None:
    """Write iterations, requests, switches and decode.parquet of an arm.

    predictor: model.json, for realised savings; None: they stay null. samples: responses of an iteration, on all
    servers. starts: how many iterations had been made at each start of verl.
    Raises IterationError naming the iteration whose samples are not all there.
    """
    model = Predictor.load(predictor) if predictor else None
    by_iteration: dict[int, list[dict]] = {}
    for generation in generations(out):
        by_iteration.setdefault(generation["iteration"], []).append(_on_one_clock(generation))
    lines = {line["step"]: line["data"] for line in verl_lines(out)}
    requests, switches, iterations, decode = [], [], [], []
    for number, data in sorted(lines.items()):
        servers = by_iteration.get(number, [])
        begin = _begin(servers) if servers else 0.0
        of_iteration = _requests(number, servers, begin)
        if len(of_iteration) != samples:
            raise IterationError(f"iteration {number}: {len(of_iteration)} samples came back, {samples} were asked for")
        if data.get(COUNTED) != samples:
            raise IterationError(f"iteration {number}: {data.get(COUNTED, 0):.0f} of {samples} samples were trained on")
        live = [_switch(number, s, g, begin, model) for g in servers for s in g["switches"]]
        live = [row | {"switch": i} for i, row in enumerate(sorted(live, key=lambda row: row["at_s"]))]
        requests += of_iteration
        switches += live
        iterations.append(_iteration(number, data, of_iteration, live, servers) | {"warm_up": number - 1 in starts})
        decode += [_decode(number, g, begin) for g in servers]
    for name, rows, schema in (
        ("requests", requests, REQUESTS),
        ("switches", switches, SWITCHES),
        ("iterations", iterations, ITERATIONS),
    ):
        pl.DataFrame(rows, schema=schema).write_parquet(out / f"{name}.parquet")
    pl.concat(decode).write_parquet(out / "decode.parquet")


def _on_one_clock(generation: dict) -> dict:
    """The record with times of the wall clock, which machines share, in place of each machine's own."""
    clock, steps = generation["clock"], generation["steps"]

    def moved(row: dict, *names: str) -> dict:
        return row | {name: row[name] + clock for name in names}

    return generation | {
        "requests": [moved(request, "arrive", "finish") for request in generation["requests"]],
        "switches": [moved(switch, "asked", "end") for switch in generation["switches"]],
        "steps": steps | {"start": [start + clock for start in steps["start"]]},
    }


def _begin(servers: Sequence[dict]) -> float:
    """Arrival of the first request, the zero of an iteration's times."""
    return min(request["arrive"] for generation in servers for request in generation["requests"])


def _requests(number: int, servers: Sequence[dict], begin: float) -> list[dict]:
    everyone = [
        request | {"server": generation["replica"]} for generation in servers for request in generation["requests"]
    ]
    return [
        {
            "iteration": number,
            "request": index,
            "arrive_s": request["arrive"] - begin,
            "finish_s": request["finish"] - begin,
            **{key: request[key] for key in ("server", "prompt_tokens", "response_tokens", "finish_reason", "seed")},
        }
        for index, request in enumerate(sorted(everyone, key=lambda request: request["arrive"]))
    ]


def _steps(generation: dict) -> pl.DataFrame:
    return pl.DataFrame(generation["steps"])


def _switch(number: int, switch: dict, generation: dict, begin: float, model: Predictor | None) -> dict:
    copied = [name for name in SWITCHES if name in switch]
    prefill_s = readmission_s(_steps(generation), switch["end"]) if switch["unfinished"] else 0.0
    predicted = switch["predicted_saving_s"] is not None and model is not None
    return {name: switch[name] for name in copied} | {
        "iteration": number,
        "server": generation["replica"],
        "at_s": switch["asked"] - begin,
        "prefill_s": prefill_s,
        "total_s": switch["total_s"] + prefill_s,
        "realised_saving_s": realised_saving_s(switch, generation, model) if predicted else None,
    }


def realised_saving_s(switch: dict, generation: dict, model: Predictor) -> float:
    """Seconds that a switch saved, its cost taken off: staying, at the lengths that came, minus the time taken.

    The time of staying is the latency model's at the true lengths, times the slowness of this generation: how much
    longer its decode steps after the switch took than the model says. A machine that also runs the training
    processes is slower than it was when it was profiled, in either layout.
    """
    totals = {request["key"]: request["response_tokens"] for request in generation["requests"]}
    finish = {request["key"]: request["finish"] for request in generation["requests"]}
    rows = switch["live"]
    width = max(map(len, rows))
    tokens, context = np.zeros((1, len(rows), width)), np.zeros((1, len(rows), width))
    start = np.zeros(len(rows))
    for replica, live in enumerate(rows):
        for slot, (key, prompt, generated) in enumerate(live):
            tokens[0, replica, slot] = totals[key] - generated
            context[0, replica, slot] = prompt + generated
        fresh = [prompt for _, prompt, generated in live if not generated]
        if fresh:
            start[replica] = model.prefill.seconds(switch["tp_from"], len(fresh), sum(fresh), 0)
    stay_s = float(drain(model.decode, switch["tp_from"], tokens, context, start).seconds[0])
    took_s = max(finish[key] for live in rows for key, _, _ in live) - switch["asked"]
    return stay_s * _slowness(_steps(generation), switch, model) - took_s


def _slowness(steps: pl.DataFrame, switch: dict, model: Predictor) -> float:
    """Seconds of the decode steps in the switch's new layout over what the model says of them; 1 without any."""
    after = decode_steps(steps).filter((pl.col("start") >= switch["end"]) & (pl.col("tp") == switch["tp_to"]))
    if after.is_empty():
        return 1.0
    predicted = model.decode.seconds(switch["tp_to"], after["batch"].to_numpy(), after["context"].to_numpy())
    return float(after["seconds"].sum() / predicted.sum())


def _iteration(
    number: int, data: dict, requests: Sequence[dict], switches: Sequence[dict], servers: Sequence[dict]
) -> dict:
    lengths = [request["response_tokens"] for request in requests]
    ends = sorted((request["finish_s"] for request in requests), reverse=True)
    tail = int(TAIL_SHARE * len(ends))
    live = [switch for switch in switches if switch["unfinished"]]
    row = {column: data.get(metric) for column, metric in VERL_METRICS.items()}
    switch_s = Counter({generation["replica"]: 0.0 for generation in servers})
    for switch in live:
        switch_s[switch["server"]] += switch["total_s"]
    return row | {
        "iteration": number,
        "iteration_s": row["iteration_s"] - (row["save_s"] or 0.0),
        "tokens": sum(lengths),
        "samples": int(row["samples"]),
        "truncated": sum(request["finish_reason"] == "length" for request in requests),
        "response_len_mean": float(np.mean(lengths)),
        "response_len_max": max(lengths),
        "switches": len(live),
        "switch_s": max(switch_s.values()),
        "tail_s": ends[0] - ends[tail],
        "decision_s": max(sum(generation["decision_s"]) for generation in servers),
    }


def _decode(number: int, generation: dict, begin: float) -> pl.DataFrame:
    return (
        decode_steps(_steps(generation))
        .with_columns(
            iteration=pl.lit(number, pl.Int64),
            server=pl.lit(generation["replica"], pl.Int64),
            at_s=pl.col("start") - begin,
        )
        .select("iteration", "server", "tp", "batch", "context", "seconds", "at_s", "rank")
    )
