"""What a finished stage tells an experiment tracker: files, parameters, metrics, data sets, a remark (pure).

Metric names have a section before the slash (gen/, iteration/, switch/, ...), which charts are grouped by.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import polars as pl

from pat import facts_verl, usage
from pat.facts_overview import overview
from pat.mlflow_limits import listed
from pat.report.experiment import benchmark, load_arm
from pat.report.style import arm_colours
from pat.report.summary import kept_iterations, medians
from pat.rl.verl_log import verl_lines

GIB = 2**30
# stage -> the file that proves it finished, and what to keep of it (not the weights: large, and made again)
OUTPUTS = {
    "hardware": ("hardware.json", ["hardware.json"]),
    "assets": ("data/train.parquet", ["data/*.parquet", "model/*.json"]),
    "profile": ("profile/decode.parquet", ["profile/*"]),
    "predictor": ("predictor/errors.json", ["predictor/*"]),
    "train": ("train/{arm}/iterations.parquet", ["train/{arm}/*"]),
    "simulate": ("simulate/summary.json", ["simulate/*"]),
    "report": ("report/summary.json", ["report/*"]),
}
KEPT_SUFFIXES = {".parquet", ".json", ".jsonl", ".txt", ".png", ".svg", ".html", ".log", ".tsv"}
ITERATION_METRICS = {
    "gen/seconds": pl.col("gen_s"),
    "gen/tokens_per_s": pl.col("tokens") / pl.col("gen_s"),
    "gen/tokens": pl.col("tokens"),
    "gen/tail_share": pl.col("tail_s") / pl.col("gen_s"),
    "iteration/seconds": pl.col("iteration_s"),
    "iteration/old_log_prob_s": pl.col("old_log_prob_s"),
    "iteration/update_s": pl.col("update_s"),
    "iteration/weight_sync_s": pl.col("weight_sync_s"),
    "switch/count": pl.col("switches"),
    "switch/seconds": pl.col("switch_s"),
    "switch/predicted_saving_s": pl.col("predicted_saving_s"),
    "switch/realised_saving_s": pl.col("realised_saving_s"),
    "reward/mean": pl.col("reward_mean"),
    "response/tokens_mean": pl.col("response_len_mean"),
    "response/tokens_max": pl.col("response_len_max"),
    "response/truncated": pl.col("truncated"),
    "response/prob_diff_max": pl.col("prob_diff_max"),
}
# One number an arm, which charts draw as bars beside each other; by name the first of their sections.
MEDIAN_METRICS = {
    "gen_s": "gen/median_seconds",
    "iteration_s": "iteration/median_seconds",
    "tokens_per_s": "gen/median_tokens_per_s",
}
MODEL_FACTS = (
    "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class DataSet:
    """One Parquet file of prompts; `digest` changes with its content."""

    name: str
    split: str
    path: str
    digest: str
    rows: int


class Measurement(NamedTuple):
    """A number; `time_ms` since 1970, None: when the stage ended."""

    name: str
    value: float
    step: int = 0
    time_ms: int | None = None


@dataclass
class Facts:
    """`params` may be nested. `name` is the run's, if not the stage's. `note` (Markdown) describes the run, `remark`
    the whole experiment. `image` is the figure to see at once; `colour` that of the run in charts."""

    params: dict[str, object] = field(default_factory=dict)
    metrics: list[Measurement] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    data: list[DataSet] = field(default_factory=list)
    name: str | None = None
    note: str | None = None
    remark: str | None = None
    image: Path | None = None
    colour: str | None = None

    def measure(self, name: str, value: float | None, step: int = 0, time_ms: int | None = None) -> None:
        """Notes a number, if there is one."""
        if value is not None and math.isfinite(value):
            self.metrics.append(Measurement(name, float(value), step, time_ms))


def stage_files(directory: Path, stage: str) -> list[Path]:
    """The files of a finished stage, with its configuration, log and benchmark where there are such.

    ValueError: no such stage. FileNotFoundError: it has not finished, and which file says so.
    """
    kind, _, arm = stage.partition("-")
    if kind not in OUTPUTS or (kind == "train") != bool(arm):
        raise ValueError(f"no stage {stage!r}: the stages are {', '.join(OUTPUTS)} (train-ARM)")
    proof, patterns = OUTPUTS[kind]
    if not (done := directory / proof.format(arm=arm)).exists():
        raise FileNotFoundError(f"stage {stage} has not finished: {done} is missing")
    patterns = [*patterns, f"config/{stage}.json", f"logs/{stage}.log", f"benchmarks/{stage}.tsv"]
    found = (path for pattern in patterns for path in sorted(directory.glob(pattern.format(arm=arm))))
    return [path for path in found if path.is_file() and path.suffix in KEPT_SUFFIXES]


def collect(directory: Path, stage: str) -> Facts:
    """The facts of a finished stage of the experiment in `directory`."""
    kind, _, arm = stage.partition("-")
    facts = Facts()
    if kind == "train":
        _train(directory, arm, facts)
    else:
        {
            "hardware": _hardware,
            "assets": _assets,
            "profile": _profile,
            "predictor": _predictor,
            "simulate": _simulate,
            "report": _report,
        }[kind](directory, facts)
    facts.tags |= _job(directory / "jobs" / f"{stage}.json")
    seconds, max_rss = benchmark(directory / "benchmarks" / f"{stage}.tsv")
    facts.measure("stage/seconds", seconds)
    facts.measure("stage/max_rss_mib", max_rss)
    return facts


def flatten(params: Mapping, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names and text; lists and the like as JSON."""
    for key, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


def _hardware(directory: Path, facts: Facts) -> None:
    hardware = _json(directory / "hardware.json")
    nodes = hardware["nodes"]
    devices = [device["name"] for node in nodes for device in node.get("devices") or []]
    facts.params = {
        "hardware": {
            "hostname": hardware.get("hostname"),
            "source": hardware.get("source"),
            "cpu_model": hardware.get("cpu_model"),
            "device_names": sorted(set(devices)),
            "nodes": len(nodes),
            "devices": len(devices),
            "cpus": sum(node["cpus"] for node in nodes),
            "memory_gib": round(sum(node.get("memory_bytes") or 0 for node in nodes) / GIB, 1),
        },
        "versions": hardware.get("versions") or {},
    }


def _assets(directory: Path, facts: Facts) -> None:
    facts.data = _data(directory)
    facts.params = {
        "checkpoint": _checkpoint(directory),
        "data": {f"{data.split}_rows": data.rows for data in facts.data},
    }


def _checkpoint(directory: Path) -> dict:
    """What the model is: its shape and the bytes of its weights."""
    model = _json(directory / "model" / "config.json")
    weights = sum(path.stat().st_size for path in (directory / "model").glob("*.safetensors"))
    return {key: model[key] for key in MODEL_FACTS if key in model} | ({"weight_bytes": weights} if weights else {})


def _profile(directory: Path, facts: Facts) -> None:
    machine = _json(directory / "profile" / "machine.json")
    tables = sorted((directory / "profile").glob("*.parquet"))
    rows = {path.stem: pl.scan_parquet(path).select(pl.len()).collect().item() for path in tables}
    facts.params = {"profile_hostname": machine.get("hostname"), "profile_source": machine.get("source", "engine")}
    facts.params["profile_rows"] = rows
    facts.tags = _origin(machine)
    decode = pl.read_parquet(directory / "profile" / "decode.parquet")
    steps = decode.group_by("tp", "batch").agg(pl.col("seconds").median()).sort("tp", "batch")
    for tp, batch, seconds in steps.iter_rows():
        facts.measure(f"profile/decode_ms_by_batch.tp{tp}", 1000 * seconds, step=batch)


def _predictor(directory: Path, facts: Facts) -> None:
    for part, layouts in _json(directory / "predictor" / "errors.json").items():
        for layout, error in layouts.items():
            name = layout.replace("->", "_to_")  # trackers forbid ">" in a name
            facts.measure(f"predictor/{part}_median_abs_pct.tp{name}", error["median_abs_pct"])
            facts.measure(f"predictor/{part}_p90_abs_pct.tp{name}", error["p90_abs_pct"])


def _train(directory: Path, name: str, facts: Facts) -> None:
    arm = load_arm(directory / "train" / name)
    savings = (
        arm.switches.filter(pl.col("unfinished") > 0)
        .drop_nulls(["predicted_saving_s", "realised_saving_s"])
        .group_by("iteration")
        .agg(pl.col("predicted_saving_s", "realised_saving_s").sum())
    )
    iterations = arm.iterations.join(savings, on="iteration", how="left")
    for row in iterations.select("iteration", **ITERATION_METRICS).iter_rows(named=True):
        step = row.pop("iteration")
        for metric, value in row.items():
            facts.measure(metric, value, step)
    for line in verl_lines(directory / "train" / name):
        for metric, value in facts_verl.metrics(line["data"]):
            facts.measure(metric, value, line["step"])
    summary = medians(kept_iterations(arm.iterations))
    for column, metric in MEDIAN_METRICS.items():
        facts.measure(metric, summary[column])
    facts.params = {"versions": arm.run.get("versions") or {}, "checkpoint": _checkpoint(directory)}
    facts.tags = {"pat.arm": name} | _origin(arm.run)
    facts.data = _data(directory)
    facts.colour = arm_colours(sorted((path.name for path in directory.glob("train/*")), key=_arm_order))[name]
    _usage(directory / "train" / name / "usage.parquet", facts)


def _arm_order(name: str) -> tuple:
    """Static sizes ascending, then the others: an arm's colour is the same as in the report."""
    size = name.removeprefix("tp")
    return (not size.isdigit(), int(size) if size.isdigit() else 0, name)


def _simulate(directory: Path, facts: Facts) -> None:
    summary = _json(directory / "simulate" / "summary.json")
    for arm, values in summary["arms"].items():
        facts.measure(f"simulate/gen_seconds.{arm}", values["gen_s"])
        facts.measure(f"simulate/switches.{arm}", values["switches"])
        facts.measure(f"simulate/longer_than_oracle_pct.{arm}", summary["regret_pct"][arm])
    for reference, gain in summary["gain_pct"].items():
        facts.measure(f"simulate/pat_saves_pct.over_{reference}", gain)
    facts.params = {"stage": summary["stage"]}


def _report(directory: Path, facts: Facts) -> None:
    summary = _json(directory / "report" / "summary.json")
    told = overview(summary)
    for name, value in told.metrics.items():
        facts.measure(name, value)
    facts.params = told.params
    facts.tags = {"pat.fastest": told.fastest}
    facts.name, facts.note, facts.remark = f"overview: {summary['verdict']}", told.note, told.remark
    facts.image = directory / "report" / "headline.png"


def _usage(path: Path, facts: Facts) -> None:
    if path.exists():
        samples = pl.read_parquet(path)
        facts.measure("stage/gpu_energy_wh", usage.energy_wh(samples))
        for name, value, step, time_s in usage.measurements(samples):
            facts.measure(name, value, step, int(1000 * time_s))


def _origin(record: dict) -> dict[str, str]:
    """Tags for the commit and the Slurm job that a stage recorded, where it did."""
    return {f"pat.{key}": str(record[key]) for key in ("git", "slurm_job_id") if record.get(key)}


def _job(path: Path) -> dict[str, str]:
    """Tags for the Slurm job that the stage ran in, and its node, where `pat.jobs.note` wrote them down."""
    noted = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    names = {"slurm_job_id": "pat.slurm_job_id", "node": "pat.node"}
    return {tag: str(noted[key]) for key, tag in names.items() if noted.get(key)}


def _data(directory: Path) -> list[DataSet]:
    found = []
    for split in ("train", "val"):
        if (path := directory / "data" / f"{split}.parquet").exists():
            sources = pl.read_parquet(path, columns=["data_source"])["data_source"]
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            name = listed(sources.cast(pl.String).fill_null("no data_source").unique().sort())
            found.append(DataSet(name, split, str(path.resolve()), digest, len(sources)))
    return found


def _json(path: Path) -> dict:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    return json.loads(path.read_text(encoding="utf-8"))
