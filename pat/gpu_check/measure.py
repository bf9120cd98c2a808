"""The parts of `pat gpu-check` that run in processes of their own: ``python -m pat.gpu_check.measure PART JSON``."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

from pat.engine.cpu import environment, processes

SHORT, LONG = 16, 80  # tokens: the difference of two generations is decode steps only
PROMPT = 32  # tokens


def options(plan: dict) -> dict:
    """Arguments for both engines: the same kernels, and weights that are not read."""
    return {
        "model_path": plan["model"],
        "load_format": "dummy",
        "dtype": plan["dtype"],
        "skip_tokenizer_init": True,
        "log_level": "error",
        "max_total_tokens": plan["tokens"],
        "random_seed": 0,
    }


async def generate(engine, requests: int, tokens: int) -> float:
    """Seconds of generating ``tokens`` greedy tokens for as many requests."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    prompts = [[3 + (7 * number + j) % 400 for j in range(PROMPT)] for number in range(requests)]
    begin = time.monotonic()
    await asyncio.gather(*[engine.async_generate(input_ids=one, sampling_params=params) for one in prompts])
    return time.monotonic() - begin


async def step_ms(engine, requests: int, repeats: int) -> list[float]:
    """Milliseconds of a decode step with ``requests`` requests in each of some repeats, after a first one."""
    await generate(engine, requests, SHORT)
    runs = [await generate(engine, requests, LONG) - await generate(engine, requests, SHORT) for _ in range(repeats)]
    return [1e3 * seconds / (LONG - SHORT) for seconds in runs]


def told(milliseconds: list[float]) -> str:
    return f"{statistics.median(milliseconds):.2f} ({min(milliseconds):.2f} to {max(milliseconds):.2f}) ms a step"


def pat(plan: dict) -> dict:
    """PAT's engine: decode at every size, switches with requests in flight, memory of the graphs."""
    processes.warm()
    from pat.engine.api import Engine

    sizes, ranks = plan["tp_sizes"], max(plan["tp_sizes"])
    engine = Engine(tp_sizes=tuple(sizes), one_device=plan["one_device"], **options(plan))
    found = {"decode": [], "switches": []}

    async def run() -> None:
        for tp in sizes:
            await engine.async_switch(tp)
            for batch in plan["batches"]:
                milliseconds = await step_ms(engine, batch * (ranks // tp), plan["repeats"])
                found["decode"].append({"engine": "pat", "tp": tp, "batch": batch, "step_ms": milliseconds})
                print(f"pat, tp {tp}, batch {batch}: {told(milliseconds)}", flush=True)
        await engine.async_switch(sizes[0])
        work = asyncio.ensure_future(generate(engine, plan["batches"][-1] * ranks, plan["switch_tokens"]))
        while not engine.progress()[0] and not work.done():
            await asyncio.sleep(0.01)
        for tp in [*sizes[1:], *reversed(sizes[:-1])] * 2:
            await asyncio.sleep(0.05)
            record = await engine.async_switch(tp, "migrate")
            phases = {name[:-2]: value for name, value in record.items() if name.endswith("_s") and "pred" not in name}
            kept = {name: record[name] for name in ("tp_from", "tp_to", "kv", "unfinished", "total_s")}
            phases.pop("total")
            found["switches"].append(kept | {"phases": phases})
            print(
                f"switch {kept['tp_from']} -> {tp}, {kept['unfinished']} requests: {kept['total_s']:.3f} s", flush=True
            )
        await work

    try:
        engine.loop.run_until_complete(run())
        found["graph_memory_bytes"] = engine.graph_memory()
    finally:
        engine.shutdown()
    return found


def stock(plan: dict) -> dict:
    """SGLang's own engine at one size, unmodified."""
    environment.prepare()
    tp, decode = plan["tp"], []
    os.environ["SGLANG_PLUGINS"] = "none"  # by name: PAT's is none of them
    if not environment.has_accelerator():
        os.environ.update(environment.thread_binding(tp))
    from pat.engine import sglang_api as sg

    engine = sg.Engine(tp_size=tp, **environment.server_args() | options(plan))
    try:
        for batch in plan["batches"]:
            milliseconds = engine.loop.run_until_complete(step_ms(engine, batch, plan["repeats"]))
            decode.append({"engine": "stock", "tp": tp, "batch": batch, "step_ms": milliseconds})
            print(f"stock SGLang, tp {tp}, batch {batch}: {told(milliseconds)}", flush=True)
    finally:
        engine.shutdown()
    return {"decode": decode}


class Recorder:
    """A plugin of pytest: a line a test as soon as it is over, whatever becomes of those after it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        message = ""
        if report.skipped:
            message = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif report.failed:
            message = report.longreprtext[-2000:]
        row = {"name": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "message": message}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{report.outcome}: {report.nodeid}", flush=True)


def tests(plan: dict) -> dict:
    """The tests that need a GPU; each outcome goes to ``plan["lines"]``."""
    import pytest

    arguments = [*plan["tests"], "-m", plan["marker"], "-p", "no:cacheprovider", "-q"]
    status = pytest.main(arguments, plugins=[Recorder(Path(plan["lines"]))])
    if status not in (0, 1):  # 1: some failed, which their rows say
        raise RuntimeError(f"pytest ended with {status!r}")
    return {}


if __name__ == "__main__":
    part = {"pat": pat, "stock": stock, "tests": tests}[sys.argv[1]]
    written = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    Path(written["out"]).write_text(json.dumps(part(written)), encoding="utf-8")
