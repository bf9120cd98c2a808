"""A training that was interrupted goes on from verl's last checkpoint; what it had measured by then stays.

``EXPERIMENT/checkpoints/ARM/`` holds verl's checkpoints and ``start.json``: the settings and input files that they
belong to. Snakemake, which removes the outputs of a failed rule, does not know this folder. ``EXPERIMENT/train/ARM/``
holds the records of the iterations.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pat import basis, digest
from pat.rl import collect


@dataclass(frozen=True)
class Start:
    """Where a training begins.

    done: iterations that need not be made again. checkpoint: of the last of them; None: from the beginning, or
    nothing is left to do. starts: iterations that had been made at each start of verl up to this one.
    """

    done: int
    checkpoint: Path | None
    starts: tuple[int, ...]


def folder(experiment: Path, arm: str) -> Path:
    return experiment / "checkpoints" / arm


def prepare(cfg, experiment: Path, arm: str, out: Path) -> Start:
    """Find out where the training of ``arm`` begins, and remove what is not to be kept of an earlier one.

    An earlier one counts only if it was of the same settings (``cfg``), files of model, data and predictor, code,
    packages and files that the settings name, and if ``train.save_every`` is set. out: the arm's folder.
    """
    checkpoints = folder(experiment, arm)
    about = {"config": json.loads(cfg.model_dump_json()), "files": _inputs(experiment, arm)}
    about |= {"code": digest.of_code(basis.code_files(f"train-{arm}"), basis.PACKAGE)}
    about |= {"packages": basis.installed(basis.PACKAGES["train"])}
    about |= {"own": {str(each): digest.code(each) for each in basis.files("train", cfg)}}
    earlier = _read(checkpoints / "start.json")
    start = Start(0, None, (0,))
    if cfg.train.save_every and earlier and earlier["about"] == about:
        start = _last(checkpoints, out, cfg.train.iterations, cfg.train.nodes, earlier["starts"])
    if start.done:
        _prune(start, checkpoints, out)
    else:
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(checkpoints, ignore_errors=True)
        out.mkdir(parents=True)
    if cfg.train.save_every:
        checkpoints.mkdir(parents=True, exist_ok=True)
        partial = checkpoints / "start.part"
        partial.write_text(json.dumps({"about": about, "starts": start.starts}, indent=2) + "\n", encoding="utf-8")
        partial.rename(checkpoints / "start.json")
    return start


def finish(experiment: Path, arm: str, out: Path) -> None:
    """Of a training whose tables are written: remove its checkpoints, and put verl's metrics into one file."""
    if (before := out / "verl-before.jsonl").exists():
        _write(collect.verl_lines(out), out / "verl.jsonl")
        before.unlink()
    shutil.rmtree(folder(experiment, arm), ignore_errors=True)


def _inputs(experiment: Path, arm: str) -> dict[str, list[int]]:
    """Size and time of change of each file that the training reads."""
    files = [*(experiment / "model").rglob("*"), experiment / "data" / "train.parquet"]
    files += [experiment / "predictor" / "model.json"] if arm == "pat" else []
    states = {str(file.relative_to(experiment)): file.stat() for file in sorted(files) if file.is_file()}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _last(checkpoints: Path, out: Path, iterations: int, servers: int, starts: list[int]) -> Start:
    """The last iteration that has its checkpoint and, like all before it, its records."""
    recorded = _recorded(out, servers)
    if recorded >= iterations:
        return Start(iterations, None, tuple(starts))
    tracker = checkpoints / "latest_checkpointed_iteration.txt"  # verl writes it when a checkpoint is complete
    complete = int(tracker.read_text(encoding="utf-8")) if tracker.exists() else 0
    steps = [step for step in _steps(checkpoints) if step <= min(complete, recorded)]
    if not steps:
        return Start(0, None, (0,))
    done = max(steps)
    earlier = {step for step in starts if step < done}
    return Start(done, checkpoints / f"global_step_{done}", tuple(sorted(earlier | {done})))


def _recorded(out: Path, servers: int) -> int:
    """Iterations, counted from the first, that have verl's metrics and a record of each server."""
    measured = {line["step"] for line in collect.verl_lines(out)}
    done = 0
    while done + 1 in measured and len(list((out / "rollout").glob(f"{done + 1:06d}-*.json"))) == servers:
        done += 1
    return done


def _steps(checkpoints: Path) -> dict[int, Path]:
    # of checkpoints beyond job.KEPT verl removes the actor and leaves the folder
    found = [path for path in checkpoints.glob("global_step_*") if (path / "actor").is_dir()]
    return {int(path.name.removeprefix("global_step_")): path for path in found}


def _prune(start: Start, checkpoints: Path, out: Path) -> None:
    """Leave the records of the first ``start.done`` iterations and their checkpoint, nothing else."""
    _write([line for line in collect.verl_lines(out) if line["step"] <= start.done], out / "verl-before.jsonl")
    (out / "verl.jsonl").unlink(missing_ok=True)  # verl overwrites it
    for record in (out / "rollout").iterdir():
        if int(record.name[:6]) > start.done or record.suffix != ".json":
            record.unlink()
    for step, path in _steps(checkpoints).items():
        if step != start.done:
            shutil.rmtree(path)


def _write(lines: list[dict[str, Any]], file: Path) -> None:
    partial = file.with_suffix(".part")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    partial.rename(file)  # at once: it may be interrupted again
