"""What goes wrong on a cluster: what the user reads, what is kept, and that the same command does what is missing.

Real Slurm, real Snakemake, the project's own rules and profile; the stages are those of faulty_pat.py. What each of
these looks like is described in docs/clusters.md.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster import Cluster
from tests.workflow.project import ROOT, copy_project

pytestmark = [pytest.mark.workflow, pytest.mark.slow]

# The profile waits as suits a cluster of many users; a test need not.
QUICK = ["--slurm-init-seconds-before-status-checks", "1", "--seconds-between-status-checks", "1"]
QUICK += ["--latency-wait", "5", "--retries", "0"]


class Project:
    """A copy of the project whose experiments end as FAULTS.json says."""

    def __init__(self, folder: Path, *experiments: str) -> None:
        self.folder = copy_project(folder)
        (folder / "bin").mkdir()
        program = folder / "bin" / "pat"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent}/faulty_pat.py "$@"\n')
        program.chmod(0o755)
        raw = yaml.safe_load((ROOT / "config" / "ci.yaml").read_text())
        raw["experiments"] = {name: {} for name in experiments}
        (folder / "config" / "faults.yaml").write_text(yaml.safe_dump(raw))
        self.faults()

    def faults(self, **faults: str) -> None:
        (self.folder / "FAULTS.json").write_text(json.dumps(faults))

    def start(self, *words: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "snakemake", "--profile", "slurm", "--configfile", "config/faults.yaml"]
        env = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [*command, *QUICK, *words],
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, limit_s: float = 240.0) -> tuple[int, str]:
        return finish(self.start(*words), limit_s)

    def runs(self) -> list[str]:
        """What was started, as STAGE EXPERIMENT."""
        path = self.folder / "runs.txt"
        return [" ".join(line.split()[:2]) for line in path.read_text().splitlines()] if path.exists() else []

    def text(self, name: str) -> str | None:
        path = self.folder / "results" / name
        return path.read_text() if path.exists() else None


def finish(process: subprocess.Popen, limit_s: float = 240.0) -> tuple[int, str]:
    try:
        out, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"Snakemake did not end in {limit_s} s: {process.communicate()[0][-4000:]}") from None
    return process.returncode, out


def wait_for(found: Callable, limit_s: float = 120.0):
    """What ``found`` returns once it is true."""
    end = time.monotonic() + limit_s
    while not (value := found()):
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.2)
    return value


def job_of(cluster: Cluster, project: Project, what: str) -> dict[str, str] | None:
    """The running Slurm job in which ``what`` ("assets NAME") was started last."""
    path = project.folder / "runs.txt"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    numbers = [words[2] for words in lines if " ".join(words[:2]) == what]
    found = [job for job in cluster.jobs() if numbers and job["JobId"] == numbers[-1] and job["JobState"] == "RUNNING"]
    return found[0] if found else None


FATES = {
    # experiment: (fault, state in Slurm, what the user reads)
    "fails": ("fail", "FAILED", "ValueError: the prompts are of another model"),
    "cancelled": ("hang", "CANCELLED", "CANCELLED"),
    "late": ("hang", "TIMEOUT", "DUE TO TIME LIMIT"),
    "hungry": ("eat", "FAILED", "exceeded memory limit"),  # OUT_OF_MEMORY where Slurm limits memory by cgroups
}


class Outcome:
    """One session of Snakemake in which one job ends well and the others do not, and what it printed."""

    def __init__(self, cluster: Cluster, project: Project) -> None:
        self.project = project
        self.goals = [f"results/{name}/data/train.parquet" for name in ("fine", *FATES)]
        limits = ["--set-resources", "assets:runtime=1", "assets:mem_mb=2000"]
        project.faults(**{name: fault for name, (fault, _, _) in FATES.items()})
        process = project.start(*self.goals, *limits)
        job = wait_for(lambda: job_of(cluster, project, "assets cancelled"))
        cluster.run("scancel", job["JobId"])
        self.status, self.out = finish(process)
        self.states = {}
        for line in (project.folder / "runs.txt").read_text().splitlines():
            _, name, number, _ = line.split()
            (self.states[name],) = [job["JobState"] for job in cluster.jobs() if job["JobId"] == number]


@pytest.fixture(scope="module")
def outcome(cluster, tmp_path_factory) -> Outcome:
    return Outcome(cluster, Project(tmp_path_factory.mktemp("fates"), "fine", *FATES))


def test_the_others_go_on(outcome):
    assert outcome.status != 0
    assert outcome.states["fine"] == "COMPLETED"
    assert outcome.project.text("fine/data/train.parquet") == "whole"


@pytest.mark.parametrize("name", FATES)
def test_state_and_reason_are_told(outcome, name):
    _, state, reason = FATES[name]
    assert outcome.states[name].startswith(state)
    blocks = re.split(r"^(?=Error in rule )", outcome.out, flags=re.MULTILINE)[1:]
    (block,) = [
        block for block in blocks if f"results/{name}/data/train.parquet" in block.partition("external_jobid")[0]
    ]
    assert f"SLURM status is: '{state}'" in block
    assert f"results/{name}/logs/assets.log" in block
    slurm_log = next((outcome.project.folder / "results/logs/slurm/rule_assets" / name).glob("*.log"))
    assert str(slurm_log.relative_to(outcome.project.folder)) in block
    assert reason in slurm_log.read_text()


@pytest.mark.parametrize("name", FATES)
def test_half_an_output_is_never_taken_for_a_whole_one(outcome, name):
    assert outcome.project.text(f"{name}/data/train.parquet") is None


def test_the_same_command_does_what_is_missing(outcome):
    outcome.project.faults()
    before = len(outcome.project.runs())
    status, out = outcome.project.run(*outcome.goals)
    assert status == 0, out[-3000:]
    assert sorted(outcome.project.runs()[before:]) == sorted(f"assets {name}" for name in FATES)
    assert {outcome.project.text(f"{name}/data/train.parquet") for name in FATES} == {"whole"}


def test_a_job_whose_node_is_lost_starts_again_elsewhere(cluster, tmp_path):
    project = Project(tmp_path, "lost")
    project.faults(lost="once", stage="profile")
    process = project.start("results/lost/profile/machine.json")
    job = wait_for(lambda: job_of(cluster, project, "profile lost"))
    cluster.lose_node(job["NodeList"])
    try:
        status, out = finish(process)
        assert status == 0, out[-3000:]
        assert project.runs() == ["assets lost", "profile lost", "profile lost"]
        again = [found for found in cluster.jobs() if found["JobId"] == job["JobId"]]
        assert [(found["JobState"], found["Restarts"]) for found in again] == [("COMPLETED", "1")]
        assert again[0]["NodeList"] != job["NodeList"]
        assert project.text("lost/profile/machine.json") == "whole"
    finally:
        cluster.start_node(job["NodeList"])
        wait_for(lambda: cluster.states().get(job["NodeList"]) == "idle")


def test_an_interrupt_cancels_the_jobs_and_leaves_no_lock(cluster, tmp_path):
    project = Project(tmp_path, "stopped")
    project.faults(stopped="hang", stage="profile")
    process = project.start("results/stopped/profile/machine.json")
    job = wait_for(lambda: job_of(cluster, project, "profile stopped"))
    process.send_signal(signal.SIGINT)
    status, out = finish(process)
    assert status != 0
    assert "Cancelling snakemake on user request" in out or "Terminating processes on user request" in out
    wait_for(lambda: [each["JobState"] for each in cluster.jobs() if each["JobId"] == job["JobId"]] == ["CANCELLED"])
    project.faults()
    status, out = project.run("results/stopped/profile/machine.json")
    assert status == 0, out[-3000:]
    assert project.runs() == ["assets stopped", "profile stopped", "profile stopped"]


def test_after_a_kill_the_job_is_cancelled_and_the_lock_removed_by_hand(cluster, tmp_path):
    """Snakemake ended by SIGKILL, as by a login node that goes down: the procedure of docs/clusters.md."""
    project = Project(tmp_path, "killed")
    project.faults(killed="hang", stage="profile")
    process = project.start("results/killed/profile/machine.json")
    job = wait_for(lambda: job_of(cluster, project, "profile killed"))
    process.kill()
    process.communicate()
    status, out = project.run("results/killed/profile/machine.json")
    assert status != 0
    assert "Directory cannot be locked" in out
    assert "--unlock" in out
    listed = cluster.run("squeue", "--me", "-h", "-o", "%i %j %k").split()
    assert listed[0] == job["JobId"]
    assert listed[1].startswith("pat_")
    assert "rule_profile" in listed[2]
    cluster.run("scancel", job["JobId"])
    wait_for(lambda: not cluster.run("squeue", "-h"))
    assert project.run("results/killed/profile/machine.json", "--unlock")[0] == 0
    project.faults()
    status, out = project.run("results/killed/profile/machine.json")
    assert status == 0, out[-3000:]
    assert project.runs() == ["assets killed", "profile killed", "profile killed"]
    assert project.text("killed/profile/machine.json") == "whole"


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 16 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_told_and_room_is_enough_to_go_on(cluster, tmp_path, small_disk):
    project = Project(tmp_path / "project", "full")
    (project.folder / "results").symlink_to(small_disk)
    project.faults(full="fill")
    status, out = project.run("results/full/data/train.parquet")
    assert status != 0
    assert "No space left on device" in out + (project.text("full/logs/assets.log") or "")
    assert "SLURM status is: 'FAILED'" in out
    assert project.text("full/data/train.parquet") is None
    subprocess.run(["mount", "-o", "remount,size=256m", small_disk], check=True)
    status, out = project.run("results/full/data/train.parquet")
    assert status == 0, out[-3000:]
    assert project.runs() == ["assets full"] * 2
    assert project.text("full/data/train.parquet") == "whole"
