"""Reads the finished stages of one experiment from results/EXPERIMENT/ and checks that they are complete."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import polars as pl

# The columns that the report reads.
ITERATIONS = (
    "iteration", "gen_s", "iteration_s", "update_s", "old_log_prob_s", "weight_sync_s", "tokens", "samples",
    "truncated", "reward_mean", "response_len_mean", "response_len_max", "switches", "switch_s",
    "prob_diff_max", "tail_s",
)  # fmt: skip
REQUESTS = ("iteration", "response_tokens", "arrive_s", "finish_s")
PHASES = ("agree_s", "quiesce_s", "collect_s", "move_s", "rebind_s", "resume_s", "prefill_s")
SWITCHES = (
    "iteration", "switch", "tp_from", "tp_to", "at_s", "unfinished", "kv_tokens_moved",
    "kv_tokens_recomputed", "total_s", "predicted_saving_s", "predicted_cost_s", "realised_saving_s", *PHASES,
)  # fmt: skip


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
class Experiment:
    """What the report is made of. Optional parts are None where their stage was not run."""

    hardware: dict
    arms: dict[str, Arm]  # static sizes in ascending order, then the others, `pat` last
    not_run: tuple[str, ...]  # arms that the configuration names and that have no results
    predictor_errors: dict | None
    predictor_fit: bytes | None  # PNG
    simulated: dict | None

    @property
    def config(self) -> dict:
        """The configuration that the arms ran with, taken together: a static arm's lacks the policy."""
        return {key: value for arm in self.arms.values() for key, value in arm.run["config"].items()}

    @property
    def statics(self) -> list[Arm]:
        return [arm for arm in self.arms.values() if arm.static_tp is not None]


def load(directory: Path) -> Experiment:
    """Reads an experiment. FileNotFoundError or ValueError name the file that is missing or unusable."""
    hardware = _json(directory / "hardware.json")
    found = [path.parent.name for path in directory.glob("train/*/iterations.parquet")]
    report_config = directory / "config" / "report.json"
    wanted = _json(report_config).get("arms", found) if report_config.exists() else found
    names = [name for name in wanted if name in found]
    if not names:
        missing = ", ".join(str(directory / "train" / name / "iterations.parquet") for name in wanted or ["ARM"])
        raise FileNotFoundError(f"no arm has been trained: {missing} is missing")
    arms = sorted((load_arm(directory / "train" / name) for name in names), key=_order)
    fit, simulated = directory / "predictor" / "fit.png", directory / "simulate" / "summary.json"
    errors = directory / "predictor" / "errors.json"
    needs_predictor = any(arm.name == "pat" for arm in arms)
    if needs_predictor and not fit.exists():
        raise FileNotFoundError(f"{fit} is missing")
    return Experiment(
        hardware=hardware,
        arms={arm.name: arm for arm in arms},
        not_run=tuple(name for name in wanted if name not in found),
        predictor_errors=_json(errors) if needs_predictor or errors.exists() else None,
        predictor_fit=fit.read_bytes() if fit.exists() else None,
        simulated=_json(simulated) if simulated.exists() else None,
    )


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
        return json.loads(path.read_text())
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
