import json

import polars as pl
import pytest

from pat import usage
from pat.report.experiment import Stage, load
from tests.synthetic import write_experiment


def test_arms_come_in_the_order_of_the_report(tmp_path):
    names = ("pat", "tp16", "tp2", "threshold", "tp1")
    write_experiment(tmp_path, generation=dict.fromkeys(names, (3.0, 2.0)))
    assert list(load(tmp_path).arms) == ["tp1", "tp2", "tp16", "threshold", "pat"]


def test_only_configured_arms_are_read_and_the_missing_ones_are_told(tmp_path):
    write_experiment(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "report.json").write_text(json.dumps({"arms": ["tp1", "tp4", "pat"]}))
    experiment = load(tmp_path)
    assert list(experiment.arms) == ["tp1", "pat"]
    assert experiment.not_run == ("tp4",)


@pytest.mark.parametrize(
    "name",
    [
        "hardware.json",
        "predictor/errors.json",
        "predictor/fit.png",
        "train/tp2/run.json",
        "train/tp2/requests.parquet",
        "train/pat/switches.parquet",
    ],
)
def test_a_missing_input_is_named(tmp_path, name):
    path = write_experiment(tmp_path) / name
    path.unlink()
    with pytest.raises(FileNotFoundError, match=str(path)):
        load(tmp_path)


def test_without_any_arm_the_error_says_what_is_missing(tmp_path):
    write_experiment(tmp_path, generation={})
    with pytest.raises(FileNotFoundError, match="no arm has been trained"):
        load(tmp_path)


def test_the_predictor_is_optional_without_pat(tmp_path):
    write_experiment(tmp_path, generation={"tp1": (3.0, 2.0)})
    for name in ("errors.json", "fit.png"):
        (tmp_path / "predictor" / name).unlink()
    experiment = load(tmp_path)
    assert experiment.predictor_errors is None
    assert experiment.predictor_fit is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda frame: frame.clear(), "has no rows"),
        (lambda frame: frame.drop("finish_s", "arrive_s"), "lacks the columns arrive_s, finish_s"),
    ],
)
def test_an_unusable_table_is_named(tmp_path, change, problem):
    path = write_experiment(tmp_path) / "train" / "tp1" / "requests.parquet"
    change(pl.read_parquet(path)).write_parquet(path)
    with pytest.raises(ValueError, match=f"{path} {problem}"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["train/tp1/iterations.parquet", "train/tp1/run.json"])
def test_a_file_of_garbage_is_named(tmp_path, name):
    path = write_experiment(tmp_path) / name
    path.write_text("garbage")
    with pytest.raises(ValueError, match=str(path)):
        load(tmp_path)


def test_what_a_stage_took_is_known_from_slurm_where_there_is_one(tmp_path):
    write_experiment(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    for stage in ("train-pat", "train-tp1", "predictor", "config-report", "report"):
        (tmp_path / "benchmarks" / f"{stage}.tsv").write_text("s\tmax_rss\n10.0\t512.0\n")
    jobs = {"stage": "train-pat", "slurm_job_id": 7, "node": "n1", "elapsed_s": 90.0, "energy_j": 7200}
    (tmp_path / "jobs.json").write_text(json.dumps([jobs]))
    gpus = [{"gpu": 0, "use_pct": 9.0, "memory_mb": 9.0, "power_w": 360.0}]
    sample = {"cpu_pct": 9.0, "memory_mb": 9.0, "memory_pct": 9.0, "gpus": gpus}
    samples = pl.DataFrame([sample | {"time_s": at} for at in (0.0, 10.0)], schema=usage.SCHEMA)
    for arm in ("tp1", "pat"):
        samples.write_parquet(tmp_path / "train" / arm / "usage.parquet")
    stages = {stage.name: stage for stage in load(tmp_path).stages}
    assert set(stages) == {"train-pat", "train-tp1", "predictor"}
    assert stages["train-pat"] == Stage("train-pat", 90.0, 512.0, None, "7 on n1", 2.0, "job")
    assert stages["train-tp1"] == Stage("train-tp1", 10.0, 512.0, None, None, 1.0, "GPUs")
    assert stages["predictor"] == Stage("predictor", 10.0, 512.0, None)


def test_an_arm_without_switches_is_fine(tmp_path):
    write_experiment(tmp_path)
    assert load(tmp_path).arms["tp1"].switches.is_empty()
