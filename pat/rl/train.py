"""Stage train: one arm in real verl, watched from outside, its measurements as Parquet."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pat import provenance, usage
from pat.logged import telling_lines
from pat.rl import collect, job, nodes, processes, resume

POLL_S = 0.5
START_S = 600.0  # longest that Ray, verl and SGLang may take to start, seconds


class TrainingFailed(RuntimeError):
    """verl ended with an error, stood still, or did not do what was asked."""


def run(cfg, experiment: Path, arm: str) -> None:
    """Train ``arm`` and write ``train/ARM/*.parquet``, ``run.json``, ``log.txt`` and ``verl.jsonl``.

    cfg: the sections of stage train-ARM. With ``train.save_every`` a training that was interrupted goes on from its
    last checkpoint. Raises TrainingFailed with the lines of verl's log that matter, NodesFailed if Ray does not start
    on the nodes of the job, ConfigError if the job has not so many.
    """
    out = experiment / "train" / arm
    started = time.monotonic()
    processes.exit_on_sigterm()
    try:
        begin = resume.prepare(cfg, experiment, arm, out)
        if begin.done:
            print(f"{arm}: {begin.done} of {cfg.train.iterations} iterations are there already", flush=True)
        if begin.done < cfg.train.iterations:
            variables = job.variables(out, cfg.train.nodes)
            with _ray(cfg, out, variables) as (ray, variables, check), usage.sampled(out / "usage.parquet"):
                checkpoints = resume.folder(experiment, arm)
                if cfg.train.nodes > 1:
                    job.write_router(cfg, out)
                values = job.overrides(cfg, experiment, arm, out, ray, checkpoints, begin.checkpoint)
                guarded = [sys.executable, "-m", "pat.rl.guard", ray.get("_temp_dir", ""), *job.command(values)]
                _run(guarded, variables, cfg, arm, out, begin.done, check)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    predictor = experiment / "predictor" / "model.json" if arm == "pat" else None
    collect.write(out, predictor, cfg.rollout.prompts * cfg.rollout.samples, begin.starts)
    about = {
        "arm": arm,
        "config": cfg.model_dump(mode="json"),
        "nodes": cfg.train.nodes,
        "starts": begin.starts,
        "seconds": time.monotonic() - started,
    }
    (out / "run.json").write_text(json.dumps(about | provenance.facts(), indent=2) + "\n", encoding="utf-8")
    resume.finish(experiment, arm, out)
    for leftover in ("rollout", "hydra", "ray"):
        shutil.rmtree(out / leftover, ignore_errors=True)


@contextlib.contextmanager
def _ray(cfg, out: Path, variables: dict[str, str]) -> Iterator[tuple[dict[str, Any], dict[str, str], Callable]]:
    """Arguments of ray.init, the driver's environment, and a check that Ray still runs; Ray ends with the block."""
    if cfg.train.nodes > 1:
        with nodes.started(cfg.train.nodes, cfg.ranks, out / "ray", variables) as ray:
            yield {"address": ray.address}, ray.variables, ray.check
        return
    folder = tempfile.mkdtemp(prefix="pat-ray-", dir="/tmp")  # short: sockets in it have long names
    try:
        yield job.local_ray(cfg.ranks, folder), job.with_token(variables, Path(folder, "token")), lambda: None
    finally:
        processes.end(processes.naming(folder), grace_s=0.5)  # verl has ended: its Ray has nothing left to save
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    command: list[str], variables: dict[str, str], cfg, arm: str, out: Path, done: int, check: Callable[[], None]
) -> None:
    """Run verl to its end with a line an iteration; raise TrainingFailed if it fails or stands still.

    command: verl's, run by ``pat.rl.guard``, which ends it if this process is killed. done: iterations made before.
    check: raises if what verl runs on has ended.
    """
    iterations, limit_s = cfg.train.iterations, START_S + cfg.rollout.deadline_s
    log = out / "log.txt"
    print(f"{arm}: {iterations - done} iterations, starting verl; log: {log}", flush=True)
    with open(log, "ab") as file:
        process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT)
    try:
        progress = Progress(arm, iterations, out, done, cfg.train.nodes)
        while process.poll() is None:
            time.sleep(POLL_S)
            progress.show()
            check()
            if progress.still_s > limit_s:
                raise TrainingFailed(_explain(f"{arm}: nothing has moved for {limit_s:.0f} s", log))
    finally:
        processes.end(processes.tree(process.pid), grace_s=processes.END_S)
    progress.show()
    if process.returncode:
        raise TrainingFailed(_explain(f"{arm}: verl ended with status {process.returncode}", log))
    if progress.done != iterations:
        raise TrainingFailed(_explain(f"{arm}: {progress.done} of {iterations} iterations were run", log))


class Progress:
    """A line when a generation has ended and one when its iteration has, with the time that is left."""

    def __init__(self, arm: str, iterations: int, out: Path, done: int = 0, servers: int = 1) -> None:
        self.arm, self.iterations, self.out, self.servers = arm, iterations, out, servers
        self.done = self._before = done
        self._seen = {file.name for file in self._generations()}  # that were shown
        self._started = self._moved = time.monotonic()
        self._first_done: float | None = None

    @property
    def still_s(self) -> float:
        """Seconds since anything happened."""
        return time.monotonic() - self._moved

    def show(self) -> None:
        for file in self._generations():
            if file.name not in self._seen:
                self._seen.add(file.name)
                generation = json.loads(file.read_text(encoding="utf-8"))
                where = f"server {generation['replica']}: " if self.servers > 1 else ""
                self._say(generation["iteration"], where + collect.describe(generation))
        for line in collect.verl_lines(self.out)[self.done :]:
            self.done += 1
            now = time.monotonic()
            self._first_done = self._first_done or now
            data = line["data"]
            self._say(
                line["step"],
                f"took {data['timing_s/step']:.1f} s (generation {data['timing_s/gen']:.1f} s), "
                f"mean reward {data.get('critic/rewards/mean', float('nan')):.3f}{self._left(now)}",
            )

    def _generations(self) -> list[Path]:
        return sorted((self.out / "rollout").glob("*.json"))

    def _left(self, now: float) -> str:
        left = self.iterations - self.done
        if not left:
            return ", done"
        timed = self.done - self._before - 1  # iterations since the first, which includes the start
        pace = (now - self._first_done) / timed if timed else now - self._started
        return f", about {left * pace / 60:.1f} min left in this arm"

    def _say(self, iteration: int, text: str) -> None:
        self._moved = time.monotonic()
        print(f"{self.arm} [{iteration}/{self.iterations}] {text}", flush=True)


def _explain(what: str, log: Path) -> str:
    lines = telling_lines(log.read_text(errors="replace", encoding="utf-8"))
    return "\n  ".join([what + "; what matters of its log:", *lines]) + f"\nThe whole log: {log}"
