"""`pat ui` shows what was logged wherever the configuration says that it is, after `results/` was moved too."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from mlflow import MlflowClient

import pat.report
from pat import cli, tracking
from pat.facts import stage_files
from tests import mlflow_server
from tests.synthetic import write_experiment
from tests.workflow.project import ROOT

START_S = 120.0


def configuration(folder: Path, **tracked) -> Path:
    """config/ci.yaml in ``folder``, which logs to results/ there unless ``tracked`` says otherwise."""
    raw = yaml.safe_load((ROOT / "config" / "ci.yaml").read_text())
    raw["tracking"] = {"uri": "sqlite:///results/mlflow.db", "artifacts": "results/mlartifacts"} | tracked
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return folder / "config.yaml"


@contextlib.contextmanager
def served(folder: Path):
    """MLflow's address as `pat ui` serves it from ``folder``."""
    port = mlflow_server.free_port()
    command = [sys.executable, "-m", "pat.cli", "ui", "--config", "config.yaml", "--port", str(port)]
    with (folder / "ui.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            assert server.poll() is None and time.monotonic() < deadline, (folder / "ui.log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # its session has no other processes than its own
        server.wait(timeout=10)


def test_files_are_found_after_results_were_moved(tmp_path, monkeypatch):
    before = tmp_path / "before"
    experiment = write_experiment(before / "results" / "ci-qwen3")
    pat.report.run(experiment, "Tiny", experiment / "report")
    configuration(before)
    monkeypatch.chdir(before)
    target = SimpleNamespace(uri="sqlite:///results/mlflow.db", artifacts="results/mlartifacts")
    for stage in ("train-pat", "report"):
        tracking.run(Path("results/ci-qwen3"), stage, target, {}, experiment / "tracking" / f"{stage}.json")
    after = before.rename(tmp_path / "after")
    monkeypatch.chdir(tmp_path)
    with served(after) as url:
        client = MlflowClient(tracking_uri=url)
        (found,) = [each for each in client.search_experiments() if each.name == "ci-qwen3"]
        runs = {run.data.tags["pat.stage"]: run.info.run_id for run in client.search_runs([found.experiment_id])}
        assert "train" in {item.path for item in client.list_artifacts(runs["train-pat"])}
        kept = Path(client.download_artifacts(runs["train-pat"], "", str(tmp_path)))
        for path in stage_files(after / "results" / "ci-qwen3", "train-pat"):
            assert (kept / path.relative_to(after / "results" / "ci-qwen3")).read_bytes() == path.read_bytes()
        figure = f"{url}/get-artifact?path=report%2Fheadline.png&run_uuid={runs['report']}"  # as in the description
        with urllib.request.urlopen(figure, timeout=30) as answer:
            assert answer.read() == (after / "results" / "ci-qwen3" / "report" / "headline.png").read_bytes()


def ui(monkeypatch, capsys, file: Path, *options: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["pat", "ui", "--config", str(file), *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    return ended.value.code, printed.out + printed.err


def test_of_a_server_the_address_is_told(tmp_path, monkeypatch, capsys):
    file = configuration(tmp_path, uri="http://tracker:5000")
    assert ui(monkeypatch, capsys, file) == (0, "MLflow: http://tracker:5000, a server that runs already\n")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://other")
    assert ui(monkeypatch, capsys, file)[1] == "MLflow: https://other, a server that runs already\n"


def test_before_anything_was_logged_it_says_so(tmp_path, monkeypatch, capsys):
    file = configuration(tmp_path, uri=f"sqlite:///{tmp_path}/none.db")
    code, said = ui(monkeypatch, capsys, file)
    assert code == 2
    assert said.startswith("config error: tracking.uri: got sqlite:///")
    assert "run the pipeline first" in said
