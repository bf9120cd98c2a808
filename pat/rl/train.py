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
from pathlib import Path

import psutil

from pat import provenance
from pat.logged import telling_lines
from pat.rl import collect, job

POLL_S = 0.5
START_S = 600.0  # longest that Ray, verl and SGLang may take to start, seconds
END_S = 10.0  # longest that a process may take to end when asked, seconds; Slurm kills after 30


class TrainingFailed(RuntimeError):
    """verl ended with an error, stood still, or did not do what was asked."""


def run(cfg, experiment: Path, arm: str) -> None:
    """Train ``arm`` and write ``train/ARM/*.parquet``, ``run.json``, ``log.txt`` and ``verl.jsonl``.

    cfg: the sections of stage train-ARM. Raises TrainingFailed with the lines of verl's log that matter.
    """
    out = experiment / "train" / arm
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    started = time.monotonic()
    # Slurm and Snakemake end a job by SIGTERM, which would leave verl and Ray behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    ray_folder = tempfile.mkdtemp(prefix="pat-ray-", dir="/tmp")  # short: sockets in it have long names
    try:
        command = job.command(job.overrides(cfg, experiment, arm, out, ray_folder))
        _run(command, job.variables(out), cfg, arm, out)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm repeats it; the clean-up must end
        _end(_processes_of(ray_folder), grace_s=0.5)  # verl has ended: its Ray has nothing left to save
        shutil.rmtree(ray_folder, ignore_errors=True)
    predictor = experiment / "predictor" / "model.json" if arm == "pat" else None
    collect.write(out, predictor, cfg.rollout.prompts * cfg.rollout.samples)
    about = {"arm": arm, "config": cfg.model_dump(mode="json"), "seconds": time.monotonic() - started}
    (out / "run.json").write_text(json.dumps(about | provenance.facts(), indent=2) + "\n")
    for leftover in ("rollout", "hydra"):
        shutil.rmtree(out / leftover, ignore_errors=True)


def _run(command: list[str], variables: dict[str, str], cfg, arm: str, out: Path) -> None:
    """Run verl to its end with a line an iteration; raise TrainingFailed if it fails or stands still."""
    iterations, limit_s = cfg.train.iterations, START_S + cfg.rollout.deadline_s
    log = out / "log.txt"
    print(f"{arm}: {iterations} iterations, starting verl; log: {log}", flush=True)
    with open(log, "wb") as file:
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT)
    try:
        progress = Progress(arm, iterations, out)
        while process.poll() is None:
            time.sleep(POLL_S)
            progress.show()
            if progress.still_s > limit_s:
                raise TrainingFailed(_explain(f"{arm}: nothing has moved for {limit_s:.0f} s", log))
    finally:
        _end(_tree(process.pid), grace_s=END_S)
    progress.show()
    if process.returncode:
        raise TrainingFailed(_explain(f"{arm}: verl ended with status {process.returncode}", log))
    if progress.done != iterations:
        raise TrainingFailed(_explain(f"{arm}: {progress.done} of {iterations} iterations were run", log))


class Progress:
    """A line when a generation has ended and one when its iteration has, with the time that is left."""

    def __init__(self, arm: str, iterations: int, out: Path) -> None:
        self.arm, self.iterations, self.out = arm, iterations, out
        self.done = 0
        self._seen: set[str] = set()  # generations that were shown
        self._started = self._moved = time.monotonic()
        self._first_done: float | None = None

    @property
    def still_s(self) -> float:
        """Seconds since anything happened."""
        return time.monotonic() - self._moved

    def show(self) -> None:
        for file in sorted((self.out / "rollout").glob("*.json")):
            if file.name not in self._seen:
                self._seen.add(file.name)
                generation = json.loads(file.read_text())
                self._say(generation["iteration"], collect.describe(generation))
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

    def _left(self, now: float) -> str:
        left = self.iterations - self.done
        if not left:
            return ", done"
        timed = self.done - 1  # iterations since the first, which includes the start
        pace = (now - self._first_done) / timed if timed else now - self._started
        return f", about {left * pace / 60:.1f} min left in this arm"

    def _say(self, iteration: int, text: str) -> None:
        self._moved = time.monotonic()
        print(f"{self.arm} [{iteration}/{self.iterations}] {text}", flush=True)


def _explain(what: str, log: Path) -> str:
    lines = telling_lines(log.read_text(errors="replace"))
    return "\n  ".join([what + "; what matters of its log:", *lines]) + f"\nThe whole log: {log}"


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return []


def _processes_of(ray_folder: str) -> list[psutil.Process]:
    """This job's Ray and all that it started. ``ray stop`` would end every Ray of this user on the machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(ray_folder in argument for argument in process.info["cmdline"] or ()):
            found += _tree(process.pid)
    return found


def _end(processes: list[psutil.Process], grace_s: float) -> None:
    """End processes by pid: asked first, then killed after ``grace_s`` seconds."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=END_S)
