"""A training that still runs has its curves in MLflow, and its complete run takes their place."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from pat import follow, owner, tracking
from tests.synthetic import write_experiment

STAGE = "train-pat"
DEADLINE_S = 240.0  # it stands back behind whatever else runs here


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """Results of which the training of `pat` has made no iteration yet."""
    monkeypatch.chdir(tmp_path)
    write_experiment(tmp_path / "results" / "tiny")
    (tmp_path / "results" / "tiny" / "train" / "pat" / "verl.jsonl").unlink()
    return tmp_path


def target(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(uri=f"sqlite:///{folder}/mlflow.db", artifacts=str(folder / "mlartifacts"))


def iteration(folder: Path, *steps: int, anew: bool = False) -> None:
    with (folder / "results" / "tiny" / "train" / "pat" / "verl.jsonl").open("w" if anew else "a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "data": {"timing_s/gen": 1.5 * step, "actor/grad_norm": step}}) + "\n")


def runs(folder: Path) -> dict[str, str]:
    """Name and state of the runs that are not deleted."""
    client = tracking.MlflowClient(tracking_uri=target(folder).uri)
    (found,) = [each for each in client.search_experiments() if each.name == "tiny"]
    return {run.info.run_name: run.info.status for run in client.search_runs([found.experiment_id])}


def curve(folder: Path, name: str, metric: str) -> dict[int, float]:
    client = tracking.MlflowClient(tracking_uri=target(folder).uri)
    found = client.get_experiment_by_name("tiny")
    (run,) = [each for each in client.search_runs([found.experiment_id]) if each.info.run_name == name]
    return {point.step: point.value for point in client.get_metric_history(run.info.run_id, metric)}


def test_iterations_are_shown_as_they_come_and_the_complete_run_follows(project):
    follower = follow.Follower(project / "results", {"tiny": target(project)})
    with owner.only(project / "results" / "tiny", STAGE):
        follower.look()
        assert not (project / "mlflow.db").exists()  # nothing to show yet
        iteration(project, 1, 2)
        follower.look()
        assert runs(project) == {"train-pat, running": "RUNNING"}
        assert curve(project, "train-pat, running", "gen/seconds") == {1: 1.5, 2: 3.0}
        iteration(project, 3)
        follower.look()
        follower.look()  # nothing new
        assert curve(project, "train-pat, running", "verl/actor/grad_norm") == {1: 1, 2: 2, 3: 3}
        iteration(project, 1, anew=True)
        follower.look()
        assert curve(project, "train-pat, running", "verl/actor/grad_norm") == {1: 1}  # it began again
    follower.look()
    assert runs(project) == {"train-pat, running": "FINISHED"}
    experiment = project / "results" / "tiny"
    tracking.run(experiment, STAGE, target(project), {}, experiment / "tracking" / f"{STAGE}.json")
    assert runs(project) == {"train-pat": "FINISHED"}


@contextlib.contextmanager
def following(folder: Path, uri: str):
    """`pat.follow` as Snakemake starts it, ended at the latest with the block."""
    command = [sys.executable, "-m", "pat.follow", json.dumps({"tiny": {"uri": uri}})]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_it_ends_with_a_word_about_what_was_running(project):
    iteration(project, 1)
    with owner.only(project / "results" / "tiny", STAGE), following(project, target(project).uri) as process:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with FileLock(project / "mlflow.db.lock"):  # two that set up an empty database disturb each other
                if (project / "mlflow.db").exists() and "train-pat, running" in runs(project):
                    break
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert runs(project) == {"train-pat, running": "KILLED"}


def test_a_tracker_that_is_away_is_told_once_and_ends_nothing(project):
    iteration(project, 1)
    with owner.only(project / "results" / "tiny", STAGE), following(project, "results/folder") as process:
        said = process.stdout.readline()
        time.sleep(follow.PERIOD_S + 1)
        assert process.poll() is None
        process.terminate()
        rest = process.communicate(timeout=DEADLINE_S)[0]
    assert said.startswith("running trainings are not shown for now: ValueError: tracking.uri")
    assert rest == ""


def test_who_was_killed_makes_nothing_any_more(project):
    with owner.only(project / "results" / "tiny", STAGE):
        note = project / "results" / "tiny" / "locks" / f"{STAGE}.json"
        assert owner.made_now(project / "results" / "tiny") == {STAGE}
        ended = subprocess.Popen(["true"])
        ended.wait(DEADLINE_S)
        note.write_text(json.dumps(json.loads(note.read_text()) | {"pid": ended.pid}))
        assert owner.made_now(project / "results" / "tiny") == set()
