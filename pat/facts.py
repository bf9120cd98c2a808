"""What a finished stage tells an experiment tracker: files, parameters, metrics, data sets, a remark (pure).

Metric names have a section before the slash (gen/, iteration/, switch/, ...), which charts are grouped by.
"""

import csv
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from pat.report.experiment import load_arm
from pat.report.summary import kept_iterations, medians

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
KEPT_SUFFIXES = {".parquet", ".json", ".jsonl", ".txt", ".png", ".html", ".log", ".tsv"}
ITERATION_METRICS = {
    "gen/seconds": pl.col("gen_s"),
    "gen/tokens_per_s": pl.col("tokens") / pl.col("gen_s"),
    "gen/tokens": pl.col("tokens"),
    "gen/tail_share": pl.col("tail_s") / pl.col("gen_s"),
    "gen/response_len_mean": pl.col("response_len_mean"),
    "gen/response_len_max": pl.col("response_len_max"),
    "gen/truncated": pl.col("truncated"),
    "gen/prob_diff_max": pl.col("prob_diff_max"),
    "iteration/seconds": pl.col("iteration_s"),
    "iteration/old_log_prob_s": pl.col("old_log_prob_s"),
    "iteration/update_s": pl.col("update_s"),
    "iteration/weight_sync_s": pl.col("weight_sync_s"),
    "switch/count": pl.col("switches"),
    "switch/seconds": pl.col("switch_s"),
    "switch/predicted_saving_s": pl.col("predicted_saving_s"),
    "switch/realised_saving_s": pl.col("realised_saving_s"),
    "reward/mean": pl.col("reward_mean"),
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


@dataclass
class Facts:
    """`params` may be nested; `metrics` are (name, value, step); `remark` describes the whole experiment."""

    params: dict[str, object] = field(default_factory=dict)
    metrics: list[tuple[str, float, int]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    data: list[DataSet] = field(default_factory=list)
    remark: str | None = None

    def measure(self, name: str, value: float | None, step: int = 0) -> None:
        """Notes a number, if there is one."""
        if value is not None and math.isfinite(value):
            self.metrics.append((name, float(value), step))


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
    seconds, max_rss = _benchmark(directory / "benchmarks" / f"{stage}.tsv")
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
            "devices": sorted(set(devices)),
        },
        "versions": hardware.get("versions") or {},
    }
    facts.measure("hardware/nodes", len(nodes))
    facts.measure("hardware/devices", len(devices))
    facts.measure("hardware/cpus", sum(node["cpus"] for node in nodes))
    facts.measure("hardware/memory_gib", sum(node.get("memory_bytes") or 0 for node in nodes) / GIB)


def _assets(directory: Path, facts: Facts) -> None:
    facts.data = _data(directory)
    for data in facts.data:
        facts.measure(f"data/{data.split}_rows", data.rows)
    model = _json(directory / "model" / "config.json")
    facts.params = {"checkpoint": {key: model[key] for key in MODEL_FACTS if key in model}}


def _profile(directory: Path, facts: Facts) -> None:
    machine = _json(directory / "profile" / "machine.json")
    facts.params = {"profile_hostname": machine.get("hostname")}
    facts.tags = _origin(machine)
    for path in sorted((directory / "profile").glob("*.parquet")):
        facts.measure(f"profile/{path.stem}_rows", pl.scan_parquet(path).select(pl.len()).collect().item())
    decode = pl.read_parquet(directory / "profile" / "decode.parquet")
    steps = decode.group_by("tp", "batch").agg(pl.col("seconds").median()).sort("tp", "batch")
    for tp, batch, seconds in steps.iter_rows():
        facts.measure(f"decode/ms_by_batch_tp{tp}", 1000 * seconds, step=batch)


def _predictor(directory: Path, facts: Facts) -> None:
    for part, layouts in _json(directory / "predictor" / "errors.json").items():
        for layout, error in layouts.items():
            name = layout.replace("->", "_to_")  # trackers forbid ">" in a name
            facts.measure(f"{part}/median_abs_pct_tp{name}", error["median_abs_pct"])
            facts.measure(f"{part}/p90_abs_pct_tp{name}", error["p90_abs_pct"])


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
    for metric, value in medians(kept_iterations(arm.iterations)).items():
        facts.measure(f"summary/{metric}", value)
    facts.params = {"versions": arm.run.get("versions") or {}}
    facts.tags = {"pat.arm": name} | _origin(arm.run)
    facts.data = _data(directory)


def _simulate(directory: Path, facts: Facts) -> None:
    summary = _json(directory / "simulate" / "summary.json")
    for arm, values in summary["arms"].items():
        facts.measure(f"simulated_gen_seconds/{arm}", values["gen_s"])
        facts.measure(f"simulated_switches/{arm}", values["switches"])
        facts.measure(f"regret_to_oracle_pct/{arm}", summary["regret_pct"][arm])
    for reference, gain in summary["gain_pct"].items():
        facts.measure(f"simulated_gain_pct/over_{reference}", gain)
    facts.params = {"stage": summary["stage"]}


def _report(directory: Path, facts: Facts) -> None:
    summary = _json(directory / "report" / "summary.json")
    for arm, values in summary["arms"].items():
        facts.measure(f"gen_seconds/{arm}", values["gen_s"])
        facts.measure(f"iteration_seconds/{arm}", values["iteration_s"])
        facts.measure(f"tokens_per_s/{arm}", values["tokens_per_s"])
        facts.measure(f"switches/{arm}", values["switches"])
    for what, gains in summary["gain_pct"].items():
        for reference, gain in gains.items():
            facts.measure(f"gain_{what}_pct/over_{reference}", gain)
    for part, error in summary["predictor_error_pct"].items():
        facts.measure(f"predictor_error_pct/{part}", error)
    facts.measure("lengths/matched_share", summary["matched"])
    facts.params = {"references": summary["references"]}
    facts.tags = {"pat.fastest": min(summary["arms"], key=lambda arm: summary["arms"][arm]["gen_s"])}
    facts.remark = f"{summary['answer']['gen']}\n\n{summary['answer']['iteration']}"


def _origin(record: dict) -> dict[str, str]:
    """Tags for the commit and the Slurm job that a stage recorded, where it did."""
    return {f"pat.{key}": str(record[key]) for key in ("git", "slurm_job_id") if record.get(key)}


def _data(directory: Path) -> list[DataSet]:
    found = []
    for split in ("train", "val"):
        if (path := directory / "data" / f"{split}.parquet").exists():
            sources = pl.read_parquet(path, columns=["data_source"])["data_source"]
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            name = ", ".join(sources.unique().sort())
            found.append(DataSet(name, split, str(path.resolve()), digest, len(sources)))
    return found


def _benchmark(path: Path) -> tuple[float | None, float | None]:
    """Seconds and largest resident memory (MiB) from a Snakemake benchmark; None where it has no number."""
    if not path.exists():
        return None, None
    with path.open() as lines:
        row = next(csv.DictReader(lines, delimiter="\t"), {})
    numbers = []
    for key in ("s", "max_rss"):
        try:
            numbers.append(float(row[key]))
        except (KeyError, ValueError):  # Snakemake writes "-" or "NA" for what it could not see
            numbers.append(None)
    return numbers[0], numbers[1]


def _json(path: Path) -> dict:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    return json.loads(path.read_text())
