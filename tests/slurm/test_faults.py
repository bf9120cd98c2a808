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
    # experiment: (fault, state in Slurm, what the user reads in Slurm's log)
    "fails": ("fail", "FAILED", "ValueError: the prompts are of another model"),
    "cancelled": ("hang", "CANCELLED", "CANCELLED"),
    "hungry": ("eat", "FAILED", "exceeded memory limit"),  # OUT_OF_MEMORY where Slurm limits memory by cgroups
    "late": ("hang", "TIMEOUT", "DUE TO TIME LIMIT"),
}
MODEL = "results/{}/data/train.parquet"
PROFILE = "results/{}/profile/machine.json"


class Session:
    """The same command twice: once with faults, once when their causes are gone."""

    def __init__(self, project: Project, *goals: str, **faults: str) -> None:
        self.project, self.goals = project, goals
        project.faults(**faults)

    def start(self, *words: str) -> None:
        self.process = self.project.start(*self.goals, *words)

    def end(self) -> None:
        self.status, self.out = finish(self.process)

    def again(self) -> None:
        self.ran = self.project.runs()
        self.kept = [goal for goal in self.goals if (self.project.folder / goal).exists()]
        self.project.faults()
        self.start()


class Sessions:
    """Each fault in a copy of the project of its own, all at once: most of the time Slurm and Snakemake wait."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        def session(name: str, *names: str, goal: str = MODEL, **faults: str) -> Session:
            (folder / name).mkdir()
            return Session(Project(folder / name, *names), *(goal.format(each) for each in names), **faults)

        soon = [name for name in FATES if name != "late"]
        self.fates = session("fates", "fine", *soon, **{name: FATES[name][0] for name in soon})
        self.late = session("late", "late", late="hang")
        self.lost = session("lost", "lost", goal=PROFILE, stage="profile", lost="once")
        self.stopped = session("stopped", "stopped", stopped="hang")
        self.killed = session("killed", "killed", killed="hang")
        self.all = (self.fates, self.late, self.lost, self.stopped, self.killed)
        self._first(cluster)
        self._again()

    def _first(self, cluster: Cluster) -> None:
        self.fates.start("--set-resources", "assets:mem_mb=2000")
        self.late.start("--set-resources", "assets:runtime=1")
        for each in (self.lost, self.stopped, self.killed):
            each.start()
        cluster.run("scancel", wait_for(lambda: job_of(cluster, self.fates.project, "assets cancelled"))["JobId"])
        self.stopped_job = wait_for(lambda: job_of(cluster, self.stopped.project, "assets stopped"))
        self.stopped.process.send_signal(signal.SIGINT)
        self.killed_job = wait_for(lambda: job_of(cluster, self.killed.project, "assets killed"))
        self.killed.process.kill()
        self.lost_job = wait_for(lambda: job_of(cluster, self.lost.project, "profile lost"))
        cluster.lose_node(self.lost_job["NodeList"])
        self.stopped.end()
        self.stopped_states = states_of(cluster, self.stopped_job["JobId"])
        finish(self.killed.process)
        self.locked = self.killed.project.run(*self.killed.goals)
        self.orphans = cluster.run("squeue", "--me", "--noheader", "--format", "%i %j %T %k")
        cluster.run("scancel", self.killed_job["JobId"])
        wait_for(lambda: states_of(cluster, self.killed_job["JobId"]) == ["CANCELLED"])
        self.unlocked = self.killed.project.run(*self.killed.goals, "--unlock")
        for each in (self.fates, self.lost, self.late):
            each.end()
        self.jobs = cluster.jobs()
        cluster.start_node(self.lost_job["NodeList"])
        wait_for(lambda: cluster.states().get(self.lost_job["NodeList"]) == "idle")

    def _again(self) -> None:
        for each in self.all:
            each.again()
        self.again = {each: finish(each.process) for each in self.all}

    def job(self, what: str) -> dict[str, str]:
        """The job, at its end, that ran ``what`` ("assets NAME")."""
        for each in self.all:
            for line in (each.project.folder / "runs.txt").read_text().splitlines():
                stage, name, number, _ = line.split()
                if f"{stage} {name}" == what:
                    return next(job for job in self.jobs if job["JobId"] == number)
        raise AssertionError(f"{what} was never started")


def states_of(cluster: Cluster, number: str) -> list[str]:
    return [job["JobState"] for job in cluster.jobs() if job["JobId"] == number]


@pytest.fixture(scope="module")
def sessions(cluster, tmp_path_factory) -> Sessions:
    return Sessions(cluster, tmp_path_factory.mktemp("sessions"))


def test_the_other_jobs_go_on(sessions):
    assert sessions.fates.status != 0
    assert sessions.job("assets fine")["JobState"] == "COMPLETED"
    assert "assets fine" in sessions.fates.ran


@pytest.mark.parametrize("name", FATES)
def test_state_and_reason_are_told(sessions, name):
    _, state, reason = FATES[name]
    session = sessions.late if name == "late" else sessions.fates
    assert sessions.job(f"assets {name}")["JobState"] == state
    blocks = re.split(r"^(?=Error in rule )", session.out, flags=re.MULTILINE)[1:]
    (block,) = [block for block in blocks if MODEL.format(name) in block.partition("external_jobid")[0]]
    assert f"SLURM status is: '{state}'" in block
    assert f"results/{name}/logs/assets.log" in block
    number = sessions.job(f"assets {name}")["JobId"]
    slurm_log = session.project.folder / "results/logs/slurm/rule_assets" / name / f"{number}.log"
    assert str(slurm_log.relative_to(session.project.folder)) in block
    assert reason in slurm_log.read_text()


def test_a_lost_node_costs_only_the_time(sessions):
    """Slurm starts the job again on another node, within the same session of Snakemake."""
    assert sessions.lost.status == 0, sessions.lost.out[-3000:]
    assert sessions.lost.ran == ["assets lost", "profile lost", "profile lost"]
    job = sessions.job("profile lost")
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    assert job["NodeList"] != sessions.lost_job["NodeList"]


def test_an_interrupt_cancels_the_jobs_and_leaves_no_lock(sessions):
    assert sessions.stopped.status != 0
    assert sessions.stopped_states == ["CANCELLED"]
    assert "lock" not in sessions.again[sessions.stopped][1].lower()


def test_after_a_kill_the_job_is_found_and_ended_and_the_lock_removed(sessions):
    """Snakemake ended by SIGKILL, as by a login node that goes down: the procedure of docs/clusters.md."""
    status, out = sessions.locked
    assert status != 0
    assert "Directory cannot be locked" in out
    assert "--unlock" in out
    (orphan,) = [line for line in sessions.orphans.splitlines() if line.split()[0] == sessions.killed_job["JobId"]]
    assert re.fullmatch(r"\d+ pat_\S+ RUNNING rule_assets_wildcards_killed", orphan)
    assert sessions.unlocked[0] == 0


def test_the_same_command_does_what_is_missing_and_nothing_else(sessions):
    missing = {
        sessions.fates: [f"assets {name}" for name in FATES if name != "late"],
        sessions.late: ["assets late"],
        sessions.lost: [],
        sessions.stopped: ["assets stopped"],
        sessions.killed: ["assets killed"],
    }
    for session, wanted in missing.items():
        status, out = sessions.again[session]
        assert status == 0, out[-3000:]
        assert sorted(session.project.runs()[len(session.ran) :]) == sorted(wanted)
        assert [(session.project.folder / goal).read_text() for goal in session.goals] == ["whole"] * len(session.goals)


def test_half_an_output_is_never_taken_for_a_whole_one(sessions):
    assert sessions.fates.kept == [MODEL.format("fine")]
    assert sessions.late.kept == sessions.stopped.kept == []


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 16 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_told_and_room_is_enough_to_go_on(cluster, tmp_path, small_disk):
    (tmp_path / "project").mkdir()
    project = Project(tmp_path / "project", "full")
    (project.folder / "results").symlink_to(small_disk)
    project.faults(full="fill")
    status, out = project.run("results/full/data/train.parquet")
    assert status != 0
    assert "SLURM status is: 'FAILED'" in out
    assert "MiB are free in results/. A log that is empty or breaks off means that the disk was full" in out
    assert project.text("full/data/train.parquet") is None
    subprocess.run(["mount", "-o", "remount,size=256m", small_disk], check=True)
    status, out = project.run("results/full/data/train.parquet")
    assert status == 0, out[-3000:]
    assert project.runs() == ["assets full"] * 2
    assert project.text("full/data/train.parquet") == "whole"


def test_mlflow_away_costs_only_the_logging(cluster, tmp_path):
    """The real `pat`; nothing listens at the server's address."""
    folder = copy_project(tmp_path)
    goal = "results/ci-llama/tracking/hardware.json"
    command = [sys.executable, "-m", "snakemake", "--profile", "slurm", goal, "--configfile", "config/ci.yaml"]
    away = {**os.environ, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=folder, env=away, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert "http://127.0.0.1:9" in done.stdout + done.stderr
    assert (folder / "results" / "ci-llama" / "hardware.json").exists()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "MLflow, hardware (ci-llama)" in done.stdout + done.stderr
    assert "Hardware (ci-llama)" not in done.stdout + done.stderr
    assert json.loads((folder / goal).read_text())["run_id"]
