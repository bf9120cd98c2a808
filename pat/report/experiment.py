"""Reads the finished stages of one experiment from results/EXPERIMENT/ and checks that they are complete."""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from pat import usage

# The columns that the report reads.
ITERATIONS = (
    "iteration", "gen_s", "iteration_s", "update_s", "old_log_prob_s", "weight_sync_s", "tokens", "samples",
    "truncated", "reward_mean", "response_len_mean", "response_len_max", "switches", "switch_s",
    "prob_diff_max", "tail_s", "warm_up",
)  # fmt: skip
REQUESTS = ("iteration", "response_tokens", "arrive_s", "finish_s")
PHASES = ("agree_s", "quiesce_s", "collect_s", "move_s", "rebind_s", "resume_s", "prefill_s")
SWITCHES = (
    "iteration", "switch", "tp_from", "tp_to", "at_s", "unfinished", "kv_tokens_moved",
    "kv_tokens_recomputed", "total_s", "predicted_saving_s", "predicted_cost_s", "realised_saving_s", *PHASES,
)  # fmt: skip
SIMULATED = ("arm", "repeat", "gen_s", "schedule", "live")


@dataclass(frozen=True)
class Arm:
    """One trained arm. The frames are train/ARM/{iterations,requests,switches}.parquet, one row each."""

    name: str
    run: dict
    iterations: pl.DataFrame
    requests: pl.DataFrame
    switches: pl.DataFrame

    @property
    def static_tp(self) -> int | None:
        """The tp that a static arm (`tpK`) holds; None for an arm that may change it."""
        found = re.fullmatch(r"tp(\d+)", self.name)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class Simulated:
    """The stage simulate: summary.json, and the rows of arms.parquet (a row for each arm and repeat)."""

    summary: dict
    rows: pl.DataFrame


@dataclass(frozen=True)
class Stage:
    """What a stage took. None where it was not seen."""

    name: str
    seconds: float
    memory_mib: float | None  # most resident memory
    log: str | None  # relative to the experiment's folder
    job: str | None = None  # Slurm's number of it, and the node
    energy_wh: float | None = None
    energy_of: str | None = None  # "job", as accounting has it, or "GPUs", from samples of their power


@dataclass(frozen=True)
class Experiment:
    """What the report is made of. Optional parts are None where their stage was not run."""

    name: str
    hardware: dict | None  # None if nothing was trained
    arms: dict[str, Arm]  # static sizes in ascending order, then the others, `pat` last
    not_run: tuple[str, ...]  # arms that the configuration names and that have no results
    predictor_errors: dict | None
    predictor_fit: bytes | None  # PNG
    simulated: Simulated | None
    settings: dict[str, dict]  # by stage, what it read of the configuration
    profiled: dict | None  # profile/machine.json
    rollouts: dict | None  # results/bench/rollout.json: real generation stages beside simulated ones
    stages: tuple[Stage, ...]

    @property
    def config(self) -> dict:
        """The configuration that the arms ran with, taken together: a static arm's lacks the policy.

        Without arms, what profile and simulation ran with.
        """
        if self.arms:
            return {key: value for arm in self.arms.values() for key, value in arm.run["config"].items()}
        merged: dict = {}
        for stage in ("profile", "simulate"):
            for key, value in self.settings.get(stage, {}).items():
                merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
        return merged

    @property
    def statics(self) -> list[Arm]:
        return [arm for arm in self.arms.values() if arm.static_tp is not None]


def load(directory: Path) -> Experiment:
    """Reads an experiment. FileNotFoundError or ValueError name the file that is missing or unusable.

    A configuration without arms trains nothing: then the simulation must be there.
    """
    found = [path.parent.name for path in directory.glob("train/*/iterations.parquet")]
    settings = {path.stem: _json(path) for path in sorted((directory / "config").glob("*.json"))}
    wanted = settings.get("report", {}).get("arms", found)
    names = [name for name in wanted if name in found]
    simulation = directory / "simulate" / "summary.json"
    if not names and (wanted or not simulation.exists()):
        missing = ", ".join(str(directory / "train" / name / "iterations.parquet") for name in wanted or ["ARM"])
        raise FileNotFoundError(f"no arm has been trained: {missing} is missing")
    arms = sorted((load_arm(directory / "train" / name) for name in names), key=_order)
    fit = directory / "predictor" / "fit.png"
    errors = directory / "predictor" / "errors.json"
    profiled = directory / "profile" / "machine.json"
    rollouts = directory.parent / "bench" / "rollout.json"
    needs_predictor = not arms or any(arm.name == "pat" for arm in arms)
    if needs_predictor and not fit.exists():
        raise FileNotFoundError(f"{fit} is missing")
    return Experiment(
        name=directory.resolve().name,
        hardware=_json(directory / "hardware.json") if arms or (directory / "hardware.json").exists() else None,
        arms={arm.name: arm for arm in arms},
        not_run=tuple(name for name in wanted if name not in found),
        predictor_errors=_json(errors) if needs_predictor or errors.exists() else None,
        predictor_fit=fit.read_bytes() if fit.exists() else None,
        simulated=_simulated(directory / "simulate") if simulation.exists() else None,
        settings=settings,
        profiled=_json(profiled) if profiled.exists() else None,
        rollouts=_json(rollouts) if rollouts.exists() else None,
        stages=tuple(_stages(directory)),
    )


def _simulated(directory: Path) -> Simulated:
    return Simulated(_json(directory / "summary.json"), _parquet(directory / "arms.parquet", SIMULATED))


def _stages(directory: Path) -> Iterator[Stage]:
    """The stages that ran under Snakemake, in the order in which they ended; not how settings were written.

    jobs.json, where `pat report` left it, knows of Slurm's jobs (`pat.jobs.collect`).
    """
    known = directory / "jobs.json"
    jobs = {row["stage"]: row for row in _json(known)} if known.exists() else {}
    for path in sorted((directory / "benchmarks").glob("*.tsv"), key=lambda path: (path.stat().st_mtime, path.name)):
        seconds, memory = benchmark(path)
        row = jobs.get(path.stem, {})
        seconds = row.get("elapsed_s") or seconds
        if seconds is None or path.stem.startswith(("config-", "track-", "report")):
            continue
        log = Path("logs") / f"{path.stem}.log"
        usage_file = directory / "train" / path.stem.removeprefix("train-") / "usage.parquet"
        joules = row.get("energy_j")
        sampled = usage.energy_wh(pl.read_parquet(usage_file)) if not joules and usage_file.exists() else None
        yield Stage(
            name=path.stem,
            seconds=seconds,
            memory_mib=memory,
            log=str(log) if (directory / log).exists() else None,
            job=f"{row['slurm_job_id']} on {row['node']}" if row.get("slurm_job_id") else None,
            energy_wh=joules / 3600 if joules else sampled,
            energy_of="job" if joules else "GPUs" if sampled else None,
        )


def benchmark(path: Path) -> tuple[float | None, float | None]:
    """Seconds and largest resident memory (MiB) from a Snakemake benchmark; None where it has no number."""
    if not path.exists():
        return None, None
    with path.open(encoding="utf-8") as lines:
        row = next(csv.DictReader(lines, delimiter="\t"), {})
    numbers = []
    for key in ("s", "max_rss"):
        try:
            numbers.append(float(row[key]))
        except (KeyError, ValueError):  # Snakemake writes "-" or "NA" for what it could not see
            numbers.append(None)
    return numbers[0], numbers[1]


def _order(arm: Arm) -> tuple:
    return (arm.static_tp is None, arm.static_tp or 0, arm.name == "pat", arm.name)


def load_arm(directory: Path) -> Arm:
    """Reads train/ARM. FileNotFoundError or ValueError name the file that is missing or unusable."""
    return Arm(
        name=directory.name,
        run=_json(directory / "run.json"),
        iterations=_parquet(directory / "iterations.parquet", ITERATIONS).sort("iteration"),
        requests=_parquet(directory / "requests.parquet", REQUESTS),
        switches=_parquet(directory / "switches.parquet", SWITCHES, may_be_empty=True),
    )


def _json(path: Path) -> dict:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _parquet(path: Path, columns: tuple[str, ...], may_be_empty: bool = False) -> pl.DataFrame:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    try:
        frame = pl.read_parquet(path)
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from error
    if absent := [name for name in columns if name not in frame.columns]:
        raise ValueError(f"{path} lacks the columns {', '.join(absent)}")
    if frame.is_empty() and not may_be_empty:
        raise ValueError(f"{path} has no rows")
    return frame.with_columns(pl.selectors.float().fill_nan(None))
