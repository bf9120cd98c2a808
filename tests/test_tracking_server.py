"""Tracking to an MLflow server, which is chosen by one variable: many writers, and what happens when it is away."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

import pat.report
from pat.facts import stage_files
from tests import mlflow_server
from tests.synthetic import GENERATION, write_experiment

STAGES = ("train-tp1", "train-tp2", "train-pat", "report")


def track(experiment: Path, stage: str, uri: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "pat.cli", "track", "--stage", stage]
    return subprocess.Popen(
        [*command, "--config", str(experiment / "config" / "tracking.json")],
        env=os.environ | {"MLFLOW_TRACKING_URI": uri},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Path:
    """A finished experiment whose configuration says to log to a database beside it."""
    folder = tmp_path_factory.mktemp("results")
    directory = write_experiment(folder / "tiny")
    pat.report.run(directory, "Tiny", directory / "report")
    (directory / "config").mkdir()
    local = {"uri": f"sqlite:///{folder}/mlflow.db", "artifacts": str(folder / "mlartifacts")}
    (directory / "config" / "tracking.json").write_text(json.dumps({"tracking": local}))
    return directory


def test_the_server_away_is_told_and_the_same_command_tracks_once_it_answers(experiment, tmp_path):
    port = mlflow_server.free_port()
    before = {path: path.read_bytes() for path in experiment.rglob("*") if path.is_file()}
    away = track(experiment, "hardware", f"http://127.0.0.1:{port}")
    said, _ = away.communicate(timeout=120)
    assert away.returncode == 1
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"pat.tracking.TrackingError: MLflow's server http://127.0.0.1:{port} could not be used")
    assert "run the same command again" in last
    assert {path: path.read_bytes() for path in experiment.rglob("*") if path.is_file()} == before

    with mlflow_server.running(tmp_path, port) as url:
        again = track(experiment, "hardware", url)
        said, _ = again.communicate(timeout=120)
        assert again.returncode == 0, said
        run = json.loads((experiment / "tracking" / "hardware.json").read_text())
        assert run["uri"] == url
        assert f"{url}/#/experiments/{run['experiment_id']}/runs/{run['run_id']}" in said
        assert MlflowClient(tracking_uri=url).get_run(run["run_id"]).info.status == "FINISHED"
    assert not (experiment.parent / "mlflow.db").exists()  # the variable went before the configuration


def test_four_writers_at_once_lose_nothing(experiment, tmp_path):
    with mlflow_server.running(tmp_path, mlflow_server.free_port()) as url:
        writers = {stage: track(experiment, stage, url) for stage in STAGES}
        said = {stage: writer.communicate(timeout=300)[0] for stage, writer in writers.items()}
        assert {stage: writer.returncode for stage, writer in writers.items()} == dict.fromkeys(STAGES, 0), said
        client = MlflowClient(tracking_uri=url)
        (found,) = [each for each in client.search_experiments() if each.name == experiment.name]
        runs = {run.data.tags["pat.stage"]: run for run in client.search_runs([found.experiment_id])}
        assert set(runs) == set(STAGES)
        for stage, run in runs.items():
            assert run.info.status == "FINISHED"
            kept = Path(client.download_artifacts(run.info.run_id, "", str(_made(tmp_path / "files" / stage))))
            for path in stage_files(experiment, stage):
                assert (kept / path.relative_to(experiment)).read_bytes() == path.read_bytes()
        for arm, seconds in GENERATION.items():
            history = client.get_metric_history(runs[f"train-{arm}"].info.run_id, "gen/seconds")
            assert {point.step: point.value for point in history} == dict(enumerate(seconds, start=1))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
