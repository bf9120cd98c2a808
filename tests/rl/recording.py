"""Writes what a small training job would leave behind: generations as JSON, verl's metrics as JSON lines."""

import json
from collections import Counter
from pathlib import Path

from pat.engine.transaction import PHASES
from pat.rl.iteration import COUNTED


def request(key, arrive, finish, tokens, prompt=10, reason="stop", seed=0) -> dict:
    """One request: arrival and end on the machine's clock (seconds), lengths in tokens."""
    return {
        "key": key,
        "prompt_tokens": prompt,
        "seed": seed,
        "length": None,
        "arrive": arrive,
        "finish": finish,
        "response_tokens": tokens,
        "finish_reason": reason,
        "error": None,
    }


def switch(asked, unfinished=2, live=(), saving=None, cost=None, tp_from=1, tp_to=2, total_s=0.5) -> dict:
    """One switch as the engine records it; ``live``: (key, prompt, generated) of each request by replica."""
    return {
        "tp_from": tp_from,
        "tp_to": tp_to,
        "kv": "migrate",
        "asked": asked,
        "end": asked + total_s,
        "unfinished": unfinished,
        "kv_tokens_moved": 30,
        "kv_tokens_recomputed": 0,
        "bytes_moved": 1200,
        "exchange_s": 0.05,
        **{f"{phase}_s": 0.01 * number for number, phase in enumerate(PHASES, 1)},
        "total_s": total_s,
        "predicted_saving_s": saving,
        "predicted_cost_s": cost,
        "live": live,
    }


STEP = {"start": 0.0, "seconds": 0.1, "decode": 1, "tp": 1, "batch": 2, "context": 20, "tokens": 2, "rank": 0}


def generation(iteration, requests, switches=(), steps=({},), replica=0, decision_s=(0.001,), clock=0.0) -> dict:
    """One server's part of an iteration.

    steps: what differs from STEP in each. clock: the wall clock minus the machine's own.
    """
    rows = [STEP | step for step in steps]
    return {
        "iteration": iteration,
        "replica": replica,
        "clock": clock,
        "requests": list(requests),
        "switches": list(switches),
        "steps": {name: [row[name] for row in rows] for name in STEP},
        "decision_s": list(decision_s),
    }


METRICS = {
    "timing_s/gen": 4.0,
    "timing_s/step": 9.0,
    "timing_s/update_actor": 3.0,
    "critic/rewards/mean": 0.25,
}


def write(out: Path, generations=(), metrics=()) -> None:
    """Add to an arm's folder: generations, and verl's metrics of iterations 1, 2, ...

    All samples were trained on, unless the metrics say otherwise.
    """
    (out / "rollout").mkdir(parents=True, exist_ok=True)
    for one in generations:
        file = out / "rollout" / f"{one['iteration']:06d}-{one['replica']:03d}.json"
        file.write_text(json.dumps(one))
    made = [json.loads(file.read_text()) for file in (out / "rollout").glob("*.json")]
    trained = Counter({one["iteration"]: 0 for one in made})
    for one in made:
        trained[one["iteration"]] += len(one["requests"])
    lines = [
        json.dumps({"step": step, "data": {COUNTED: float(trained[step])} | data}) + "\n"
        for step, data in enumerate(metrics, 1)
    ]
    (out / "verl.jsonl").write_text("".join(lines))
