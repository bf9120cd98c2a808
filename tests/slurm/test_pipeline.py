"""The whole pipeline of config/ci.yaml as Slurm jobs: real Slurm, real SGLang, real verl."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from pat import configfile
from tests.workflow.project import ROOT, copy_project

pytestmark = [pytest.mark.workflow, pytest.mark.training, pytest.mark.engine, pytest.mark.slow]

EXPERIMENTS = configfile.load(ROOT / "config" / "ci.yaml")
ARMS = [(name, arm) for name, config in EXPERIMENTS.items() for arm in config.arms]
GPU_RULES, OTHER_RULES = ("profile", "train"), ("assets", "predictor", "simulate")
# A test need not spare slurmctld. Two jobs at a time are timed: the nodes are one machine with few cores.
QUICK = ["--slurm-init-seconds-before-status-checks", "1", "--seconds-between-status-checks", "1"]
QUICK += ["--latency-wait", "5", "--resources", "machine=2", "mlflow=1"]


def snakemake(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "snakemake", "--profile", "slurm", "all", "--configfile", "config/ci.yaml"]
    done = subprocess.run(
        [*command, *QUICK, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    logs = [file.read_text()[-3000:] for file in folder.glob("results/*/logs/train-*.log")]
    assert done.returncode == 0, "\n".join([done.stdout[-6000:], *logs])
    return done.stdout


@pytest.fixture(scope="module")
def project(cluster, tmp_path_factory) -> Path:
    folder = copy_project(tmp_path_factory.mktemp("project"))
    snakemake(folder)
    return folder


@pytest.fixture(scope="module")
def jobs(cluster, project) -> dict[str, list[dict[str, str]]]:
    """Slurm's jobs by rule, as `scontrol show job` tells."""
    found: dict[str, list[dict[str, str]]] = {}
    for job in cluster.jobs():
        found.setdefault(re.match(r"rule_([a-z]+)", job["Comment"])[1], []).append(job)
    return found


def test_every_stage_but_the_short_ones_was_a_job(jobs):
    count = {rule: len(EXPERIMENTS) for rule in ("assets", "profile", "predictor", "simulate")}
    assert Counter({rule: len(found) for rule, found in jobs.items()}) == count | {"train": len(ARMS)}
    assert {job["JobState"] for found in jobs.values() for job in found} == {"COMPLETED"}


def test_gpu_rules_ask_for_a_gpu_a_rank_and_nodes_of_their_own(jobs):
    for job in [job for rule in GPU_RULES for job in jobs[rule]]:
        name = re.search(r"wildcards_([a-z0-9-]+)", job["Comment"])[1]
        assert job["TresPerNode"] == f"gres:gpu:h200:{EXPERIMENTS[name].ranks}"
        assert (job["NumNodes"], job["OverSubscribe"], job["Features"]) == ("1", "NO", "h200&nvlink")


def test_other_rules_ask_for_no_gpu(jobs):
    for job in [job for rule in OTHER_RULES for job in jobs[rule]]:
        assert [key for key in job if key.startswith("TresPer")] == []
        assert "gpu" not in job["TRES"]
        assert job["OverSubscribe"] == "OK"


def test_each_job_saw_its_gpus(project, jobs):
    for job in jobs["train"]:
        name, arm = re.search(r"wildcards_([a-z0-9-]+)_(\w+)", job["Comment"]).groups()
        run = json.loads((project / "results" / name / "train" / arm / "run.json").read_text())
        assert str(run["slurm_job_id"]) == job["JobId"]


@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_arms_are_comparable(project, name, arm):
    config = EXPERIMENTS[name]
    requests = pl.read_parquet(project / "results" / name / "train" / arm / "requests.parquet")
    assert requests["iteration"].unique().sort().to_list() == list(range(1, config.train.iterations + 1))
    for _, rows in requests.group_by("iteration"):
        assert sorted(rows["response_tokens"]) == sorted(config.rollout.lengths)
    summary = json.loads((project / "results" / name / "report" / "summary.json").read_text())
    assert summary["arms"][arm]["tokens"] == sum(config.rollout.lengths)
    assert 0 < summary["arms"][arm]["gen_s"] < summary["arms"][arm]["iteration_s"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_report_knows_the_cluster_and_the_jobs(project, cluster, name):
    folder = project / "results" / name
    assert (folder / "report" / "index.html").stat().st_size > 10_000
    hardware = json.loads((folder / "hardware.json").read_text())
    assert (hardware["source"], [node["name"] for node in hardware["nodes"]]) == ("slurm", cluster.names)
    rows = {row["stage"]: row for row in json.loads((folder / "jobs.json").read_text())}
    trained = {f"train-{arm}" for arm in EXPERIMENTS[name].arms}
    assert rows.keys() >= {"hardware", "assets", "profile", "predictor", "simulate"} | trained
    for stage, row in rows.items():
        if stage == "hardware":
            assert (row["slurm_job_id"], row["source"]) == (None, "benchmark")
            continue
        assert (row["state"], row["source"], row["node"] in cluster.names) == ("COMPLETED", "scontrol", True)
        assert row["gpus"] == (EXPERIMENTS[name].ranks if stage == "profile" or stage in trained else 0)
        assert row["elapsed_s"] > 0


def test_every_stage_is_in_mlflow_and_every_log_is_kept(project):
    for name, config in EXPERIMENTS.items():
        stages = ["hardware", "assets", "profile", "predictor", "simulate", "report"]
        for stage in stages + [f"train-{arm}" for arm in config.arms]:
            assert json.loads((project / "results" / name / "tracking" / f"{stage}.json").read_text())["run_id"]
    assert len(list((project / "results" / "logs" / "slurm").glob("rule_*/*/*.log"))) == 4 * len(EXPERIMENTS) + len(
        ARMS
    )


def test_a_second_run_does_nothing(project):
    assert "Nothing to be done" in snakemake(project)
