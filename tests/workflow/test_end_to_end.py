"""The whole pipeline on config/ci.yaml: real SGLang, real verl, live switches, MLflow, report."""

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import ViewType

from pat import configfile
from tests.workflow.project import ROOT, copy_project

pytestmark = [pytest.mark.workflow, pytest.mark.training, pytest.mark.engine, pytest.mark.slow]

EXPERIMENTS = configfile.load(ROOT / "config" / "ci.yaml")
ARMS = [(name, arm) for name, config in EXPERIMENTS.items() for arm in config.arms]
SWITCHING = [(name, arm) for name, arm in ARMS if not arm.startswith("tp")]


def snakemake(folder: Path) -> str:
    target = ["all", "--configfile", "config/ci.yaml"]
    command = [sys.executable, "-m", "snakemake", "--profile", "local", *target]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = copy_project(tmp_path_factory.mktemp("project"))
    snakemake(folder)
    return folder


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_summary_compares_the_arms(project, name):
    summary = json.loads((project / "results" / name / "report" / "summary.json").read_text())
    config = EXPERIMENTS[name]
    assert set(summary["arms"]) == set(config.arms)
    for arm in summary["arms"].values():
        assert 0 < arm["gen_s"] < arm["iteration_s"]
        assert arm["samples"] == config.rollout.prompts * config.rollout.samples
        assert arm["tokens"] == sum(config.rollout.lengths)
    for arm in summary["arms"].values():
        assert (arm["switch_s"] > 0) == (arm["switches"] >= 1)
        assert arm["switch_s"] < arm["gen_s"]
    if "threshold6" in summary["arms"]:
        assert summary["arms"]["threshold6"]["switches"] == 1
    if "pat" in summary["arms"]:
        pat, default = summary["arms"]["pat"], summary["arms"]["tp1"]
        assert default["switches"] == default["switch_s"] == 0
        gain = 100 * (1 - pat["gen_s"] / default["gen_s"])
        assert summary["gain_pct"]["gen"]["default"] == pytest.approx(gain, abs=0.5)
    else:
        assert summary["gain_pct"]["gen"]["default"] is None
    assert set(summary["predictor_error_pct"]) >= {"decode", "prefill", "switch"}


@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_every_sample_comes_back_with_its_replayed_length(project, name, arm):
    requests = pl.read_parquet(project / "results" / name / "train" / arm / "requests.parquet")
    rollout = EXPERIMENTS[name].rollout
    assert requests["iteration"].unique().sort().to_list() == list(range(1, EXPERIMENTS[name].train.iterations + 1))
    for _, rows in requests.group_by("iteration"):
        assert sorted(rows["response_tokens"]) == sorted(rollout.lengths)
        assert rows["finish_reason"].null_count() == 0
        assert (rows["finish_s"] > rows["arrive_s"]).all()


def test_a_threshold_goes_wide_in_every_iteration_when_so_many_requests_are_left(project):
    switches = pl.read_parquet(project / "results" / "ci-llama" / "train" / "threshold6" / "switches.parquet")
    live = switches.filter(pl.col("unfinished") > 0)
    assert live["iteration"].to_list() == list(range(1, EXPERIMENTS["ci-llama"].train.iterations + 1))
    assert (live["tp_to"] == 2).all()
    assert (live["unfinished"] <= 6).all()
    assert live["predicted_saving_s"].null_count() == live.height


@pytest.mark.parametrize(("name", "arm"), SWITCHING)
def test_switches_are_told_and_each_iteration_starts_at_the_base(project, name, arm):
    switches = pl.read_parquet(project / "results" / name / "train" / arm / "switches.parquet")
    live = switches.filter(pl.col("unfinished") > 0)
    if arm == "pat":  # whether a switch pays is the machine's: what is decided must follow from what was predicted
        assert live["predicted_saving_s"].null_count() == live["predicted_cost_s"].null_count() == 0
        assert (live["predicted_saving_s"] > live["predicted_cost_s"]).all()
        assert live["realised_saving_s"].null_count() == 0
    assert (live["kv_tokens_moved"] + live["kv_tokens_recomputed"] > 0).all()
    phases = live.select("agree_s", "quiesce_s", "collect_s", "move_s", "rebind_s", "resume_s", "prefill_s")
    assert ((phases.sum_horizontal() - live["total_s"]).abs() < 1e-3).all()
    tp = 1
    for row in switches.sort("iteration", "switch").iter_rows(named=True):
        assert row["tp_from"] == tp
        tp = row["tp_to"]
    assert tp == 1
    for _, rows in switches.sort("iteration", "switch").group_by("iteration"):
        assert (rows["tp_from"][0], rows["tp_to"][-1]) == (1, 1)


@pytest.mark.parametrize(("name", "arm"), [pair for pair in ARMS if pair[1].startswith("tp")])
def test_a_static_arm_never_switches_live(project, name, arm):
    switches = pl.read_parquet(project / "results" / name / "train" / arm / "switches.parquet")
    assert switches.filter(pl.col("unfinished") > 0).is_empty()
    decode = pl.read_parquet(project / "results" / name / "train" / arm / "decode.parquet")
    assert decode["tp"].unique().to_list() == [int(arm.removeprefix("tp"))]


def test_the_same_seeds_in_every_arm(project):
    seeds = {}
    for name, arm in ARMS:
        requests = pl.read_parquet(project / "results" / name / "train" / arm / "requests.parquet")
        seeds.setdefault(name, []).append(sorted(requests.filter(pl.col("iteration") == 1)["seed"]))
    for name, lists in seeds.items():
        assert len(set(lists[0])) == EXPERIMENTS[name].rollout.prompts * EXPERIMENTS[name].rollout.samples
        assert all(each == lists[0] for each in lists)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_stage_is_one_run_in_mlflow(project, name):
    client = MlflowClient(tracking_uri=f"sqlite:///{project}/results/mlflow.db")
    experiment = client.get_experiment_by_name(name)
    runs = {run.data.tags["pat.stage"]: run for run in client.search_runs([experiment.experiment_id])}
    arms = EXPERIMENTS[name].arms
    stages = {"hardware", "assets", "profile", "predictor", "simulate", "report", *(f"train-{arm}" for arm in arms)}
    assert set(runs) == stages
    assert len(client.search_runs([experiment.experiment_id])) == len(stages)
    for arm in arms:
        run = runs[f"train-{arm}"]
        history = client.get_metric_history(run.info.run_id, "gen/seconds")
        assert len(history) == EXPERIMENTS[name].train.iterations
        files = project / "results" / "mlartifacts" / name / run.info.run_id / "artifacts"
        assert (files / "train" / arm / "iterations.parquet").exists()
        assert len(client.get_metric_history(run.info.run_id, "verl/actor/grad_norm")) == len(history)
        assert run.data.params
        assert run.data.metrics["system/cpu_utilization_percentage"] >= 0
    assert runs["report"].info.run_name.startswith("overview: ")
    shown = client.search_runs([experiment.experiment_id], "tags.`pat.live` = 'yes'", ViewType.DELETED_ONLY)
    assert {run.info.run_name for run in shown} == {f"train-{arm}, running" for arm in arms}  # while they did


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_report_stands_alone(project, name):
    page = (project / "results" / name / "report" / "index.html").read_text()
    assert EXPERIMENTS[name].report.title in page
    assert not any(f'{attribute}="http' in page for attribute in ("src", "srcset"))


def test_logs_and_benchmarks_of_every_stage(project):
    for name, arm in ARMS:
        for stage in ("hardware", "assets", "profile", "predictor", f"train-{arm}", "report", "track-report"):
            assert (project / "results" / name / "logs" / f"{stage}.log").exists()
            assert (project / "results" / name / "benchmarks" / f"{stage}.tsv").exists()


def test_a_second_run_does_nothing(project):
    assert "Nothing to be done" in snakemake(project)


def test_a_title_of_its_own_needs_no_training(project):
    path = project / "config" / "ci.yaml"
    raw = yaml.safe_load(path.read_text())
    raw["report"]["title"] = "Another title"
    path.write_text(yaml.safe_dump(raw))
    out = snakemake(project)
    assert "Training" not in out
    for name in EXPERIMENTS:
        assert "Another title" in (project / "results" / name / "report" / "index.html").read_text()
