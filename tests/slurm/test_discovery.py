"""Hardware and finished jobs as a real Slurm tells them."""

import json
import os
import subprocess
import sys
import time

import pytest

from pat import cluster as hardware
from pat import doctor, jobs
from tests.workflow.project import ROOT

MISMATCHED_PYSLURM = "raise ImportError('libslurmfull-25.11.so: cannot open shared object file')\n"


def test_nodes_come_from_scontrol(cluster):
    facts = hardware.discover()
    assert facts["source"] == "slurm"
    assert [node["name"] for node in facts["nodes"]] == cluster.names
    for node in facts["nodes"]:
        assert (node["cpus"], node["memory_bytes"]) == (cluster.cpus, cluster.memory_mib << 20)
        assert [device["name"] for device in node["devices"]] == ["h200"] * cluster.gpus
        assert node["features"] == ["h200", "nvlink"]
        assert node["partitions"] == (["cpu", "gpu"] if node["name"] == "pat1" else ["gpu"])


def test_pyslurm_of_another_release_is_passed_over_and_named(cluster, tmp_path, monkeypatch):
    """An installed pyslurm whose library is not there; the real one cannot be built against Slurm 22.05."""
    (tmp_path / "pyslurm.py").write_text(MISMATCHED_PYSLURM)
    (tmp_path / "pyslurm-25.11.0.dist-info").mkdir()
    (tmp_path / "pyslurm-25.11.0.dist-info" / "METADATA").write_text("Name: pyslurm\nVersion: 25.11.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert hardware.discover()["source"] == "slurm"
    what, cure = hardware.pyslurm_mismatch()
    release = cluster.run("scontrol", "--version").split()[1].split(".")
    assert what.startswith(f"pyslurm 25.11.0 does not work with Slurm {release[0]}.{release[1]}")
    assert f"'pyslurm=={int(release[0])}.{int(release[1])}.*'" in cure


def test_doctor_compares_the_facts_with_the_cluster(cluster, tmp_path, monkeypatch):
    def levels(text: str, ranks: int = 8) -> list[tuple[str, str]]:
        (tmp_path / "cluster.yaml").write_text(text)
        monkeypatch.setenv("PAT_CLUSTER", str(tmp_path / "cluster.yaml"))
        return [(finding.level, finding.what) for finding in doctor._machine(hardware.discover(), ranks)][1:]

    assert [level for level, _ in levels("partition: gpu\ngpu_type: h200")] == ["ok"]
    assert [level for level, _ in levels("{gpus: none, partition: cpu}", 64)] == ["ok"]
    ((level, what),) = levels("partition: gpux")
    assert level == "problem"
    assert what.endswith("no partition gpux; there are cpu, gpu")
    ((level, what),) = levels("gpu_type: a100")
    assert (level, "a node has 0 (types: ['h200'])" in what) == ("problem", True)
    ((level, what),) = levels("partition: gpu", 16)
    assert (level, "16 GPUs of one node are asked for" in what) == ("problem", True)
    ((level, what),) = levels("partitions: gpu")
    assert (level, "did you mean partition?" in what) == ("problem", True)


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [("requirements: cuda", "cuda"), ("requirements: cpu", "cpu"), ("{requirements: cuda, conda: true}", "cpu")],
)
def test_doctor_looks_for_the_packages_that_jobs_run_in(cluster, tmp_path, monkeypatch, facts, wanted):
    (tmp_path / "cluster.yaml").write_text(facts)
    monkeypatch.setenv("PAT_CLUSTER", str(tmp_path / "cluster.yaml"))
    assert doctor._requirements(slurm=True) == wanted


def until_ended(number):
    """srun returns while Slurm still completes the job."""
    for _ in range(300):
        show = subprocess.run(["scontrol", "show", "job", str(number)], capture_output=True, text=True, timeout=60)
        if "JobState=COMPLETING" not in show.stdout:
            return
        time.sleep(0.1)
    raise TimeoutError(f"job {number} is still completing")


def test_a_finished_job_tells_its_time_and_gpus(cluster, tmp_path):
    """A stage notes its job; afterwards Slurm is asked about it, and what it said is kept."""
    command = [sys.executable, "-c", NOTE, str(tmp_path), "profile"]
    subprocess.run(["srun", "-n1", "--gpus=h200:2", "--nodelist=pat2", *command], check=True, timeout=60)
    number = json.loads((tmp_path / "jobs" / "profile.json").read_text())["slurm_job_id"]
    until_ended(number)
    (tmp_path / "benchmarks").mkdir()
    for stage in ("profile", "predictor", "config-profile", "track-profile"):
        (tmp_path / "benchmarks" / f"{stage}.tsv").write_text("s\th:m:s\n7.5\t0:00:07\n")
    rows = {row["stage"]: row for row in jobs.collect(tmp_path)}
    assert rows.keys() == {"profile", "predictor"}
    assert rows["predictor"]["source"] == "benchmark"
    assert (rows["predictor"]["elapsed_s"], rows["predictor"]["slurm_job_id"]) == (7.5, None)
    told = {key: rows["profile"][key] for key in ("slurm_job_id", "node", "gpus", "source", "energy_j")}
    assert told == {"slurm_job_id": number, "node": "pat2", "gpus": 2, "source": "scontrol", "energy_j": None}
    assert 1 <= rows["profile"]["elapsed_s"] < 60
    assert rows["profile"]["state"] == "COMPLETED"
    before = json.loads((tmp_path / "jobs.json").read_text())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho 'Invalid job id specified' >&2\nexit 1\n")
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    path, os.environ["PATH"] = os.environ["PATH"], f"{tmp_path}/bin:{os.environ['PATH']}"
    try:
        assert jobs.collect(tmp_path) == before  # Slurm has forgotten the job, we have not
    finally:
        os.environ["PATH"] = path


NOTE = "import sys, time\nfrom pathlib import Path\nfrom pat import jobs\n"
NOTE += "time.sleep(1.5)\njobs.note(Path(sys.argv[1]), sys.argv[2])\n"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ("{gpus: gres, requirements: cuda}", ["envs/cuda.txt", "torch 2.13.0", "uv pip install", "cluster.yaml"]),
        ("{gpus: gpu}", ["config error", "cluster.yaml: gpus: got 'gpu'"]),
    ],
)
def test_a_node_that_is_not_as_promised_is_named_before_anything_starts(cluster, tmp_path, facts, said):
    (tmp_path / "cluster.yaml").write_text(facts)
    command = [sys.executable, "-m", "pat.cli", "assets", "--config", "config/ci.yaml", "--experiment", "ci-llama"]
    srun = ["srun", "-n1", "--nodelist=pat3", *command, "--out", str(tmp_path / "out")]
    env = {**os.environ, "PAT_CLUSTER": str(tmp_path / "cluster.yaml")}
    done = subprocess.run(srun, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert [text for text in said if text not in done.stderr] == []
    assert not (tmp_path / "out" / "model").exists()
    if "requirements" in facts:
        assert "node pat3 cannot run stage assets" in done.stderr
