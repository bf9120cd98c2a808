import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import polars as pl
import pytest

import pat.report
from pat import tracking
from tests.synthetic import GENERATION, write_experiment

ONE_STAGE = """
import sys
from types import SimpleNamespace
from pathlib import Path
from pat import tracking
experiment, stage, uri, artifacts = sys.argv[1:]
out = Path(experiment) / "tracking" / f"{stage}.json"
tracking.run(Path(experiment), stage, SimpleNamespace(uri=uri, artifacts=artifacts), {"seed": 0}, out)
"""


@dataclass(frozen=True)
class Target:
    uri: str
    artifacts: str


@dataclass(frozen=True)
class Tracked:
    experiment: Path
    target: Target
    client: tracking.MlflowClient

    def track(self, stage, params=None):
        """Tracks the stage; returns its run as MLflow has it."""
        out = self.experiment / "tracking" / f"{stage}.json"
        tracking.run(self.experiment, stage, self.target, params or {}, out)
        return self.client.get_run(json.loads(out.read_text())["run_id"])

    def files(self, run, *below):
        """The run's folder of files, or one below it."""
        return Path(self.target.artifacts, self.experiment.name, run.info.run_id, "artifacts", *below)

    def runs(self):
        """Names and states of the runs that are not deleted."""
        found = self.client.get_experiment_by_name(self.experiment.name)
        return sorted((run.info.run_name, run.info.status) for run in self.client.search_runs([found.experiment_id]))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """An MLflow database that two processes, each tracking a stage, have set up at the same time."""
    directory = tmp_path_factory.mktemp("store")
    write_experiment(directory / "first")
    target = Target(f"sqlite:///{directory}/results/mlflow.db", str(directory / "results" / "mlartifacts"))
    command = [sys.executable, "-c", ONE_STAGE, str(directory / "first")]
    writers = [
        subprocess.Popen(
            [*command, stage, target.uri, target.artifacts],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for stage in ("train-tp1", "train-pat")
    ]
    outputs = [writer.communicate(timeout=120) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], outputs
    for printed, errors in outputs:
        assert printed.startswith("tracked train-")
        assert "INFO" not in errors
    return Tracked(directory / "first", target, tracking.MlflowClient(tracking_uri=target.uri))


@pytest.fixture
def tracked(store, tmp_path):
    """A fresh experiment in the same database."""
    return Tracked(write_experiment(tmp_path / tmp_path.name), store.target, store.client)


def test_two_processes_may_start_on_an_empty_database(store):
    assert store.runs() == [("train-pat", "FINISHED"), ("train-tp1", "FINISHED")]


def test_a_training_run_has_its_settings_metrics_data_and_files(tracked):
    run = tracked.track("train-pat", {"train": {"lr": 1e-6}, "tp_sizes": [1, 2]})
    assert run.info.run_name == "train-pat"
    assert run.data.params["train.lr"] == "1e-06"
    assert run.data.params["tp_sizes"] == "[1, 2]"
    assert run.data.tags["pat.arm"] == "pat"
    assert run.data.tags["pat.stage"] == "train-pat"
    assert run.data.tags["mlflow.source.git.commit"].startswith("0123456")
    history = tracked.client.get_metric_history(run.info.run_id, "gen/seconds")
    assert {point.step: point.value for point in history} == dict(enumerate(GENERATION["pat"], start=1))
    assert {item.dataset.name for item in run.inputs.dataset_inputs} == {"gsm_symbolic"}
    files = {path.name for path in tracked.files(run, "train", "pat").iterdir()}
    assert {"iterations.parquet", "switches.parquet", "log.txt"} <= files


def test_hydras_signs_and_prompts_of_many_sources_are_tracked(tracked):
    file = tracked.experiment / "data" / "train.parquet"
    frame = pl.read_parquet(file)
    names = [None, *(f"source-{i:03d}" for i in range(150))]
    many = pl.concat([frame.head(1).with_columns(data_source=pl.lit(name, pl.String)) for name in names])
    many.write_parquet(file)
    run = tracked.track("train-pat", {"train": {"extra": {"+a.b": 1, "a.b": 2, "~c": 3, "k" * 300: "v" * 9000}}})
    assert run.data.params["train.extra.a.b"] == "1"
    assert sorted(value for key, value in run.data.params.items() if key.startswith("train.extra.a.b")) == ["1", "2"]
    assert run.data.params["train.extra._c"] == "3"
    assert "v" * 6000 in run.data.params.values()
    train = next(item.dataset.name for item in run.inputs.dataset_inputs if "source" in item.dataset.name)
    assert train.startswith("no data_source, source-000, source-001, ")
    assert train.endswith(" more")


def test_files_lie_in_the_configured_folder(tracked):
    run = tracked.track("hardware")
    assert run.info.artifact_uri == f"mlflow-artifacts:/{tracked.experiment.name}/{run.info.run_id}/artifacts"
    kept = tracked.files(run, "hardware.json")
    assert kept.read_bytes() == (tracked.experiment / "hardware.json").read_bytes()


@pytest.mark.parametrize("stage", ["hardware", "assets", "profile", "predictor"])
def test_every_stage_can_be_tracked(tracked, stage):
    run = tracked.track(stage)
    assert run.data.params or run.data.metrics
    assert run.data.tags["pat.stage"] == stage


def test_the_run_lasts_as_long_as_its_stage(tracked):
    benchmark = tracked.experiment / "benchmarks" / "predictor.tsv"
    benchmark.parent.mkdir()
    benchmark.write_text("s\tmax_rss\n12.5\t300.0\n")
    info = tracked.track("predictor").info
    assert info.end_time - info.start_time == 12500
    assert info.end_time <= 1000 * benchmark.stat().st_mtime + 1


def test_the_overview_says_which_arm_won_and_shows_it(tracked):
    pat.report.run(tracked.experiment, "title", tracked.experiment / "report")
    run = tracked.track("report")
    assert run.info.run_name == "overview: not settled, pat or tp2"
    assert run.data.metrics["overview/gen_seconds.tp2"] == 41.5
    assert run.data.tags["pat.fastest"] == "pat"
    note = run.data.tags["mlflow.note.content"].split("\n\n")
    assert note[0] == "**not settled, pat or tp2**"
    assert note[1].startswith("Generation takes 39.5 s with pat")
    assert note[2] == f"![headline](get-artifact?path=report%2Fheadline.png&run_uuid={run.info.run_id})"
    assert tracked.files(run, "report", "headline.png").exists()
    experiment = tracked.client.get_experiment(run.info.experiment_id)
    assert "39.5 s with pat" in experiment.tags["mlflow.note.content"]
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_a_run_keeps_its_environment_and_the_state_of_the_code(tracked, monkeypatch):
    monkeypatch.setattr(tracking.provenance, "git_changes", lambda: "+edited\n")
    run = tracked.track("train-tp2")

    def kept(path):
        return tracked.files(run, path).read_text()

    assert f"mlflow=={version('mlflow')}" in kept("environment/packages.txt").splitlines()
    assert kept("git/changes.diff") == "+edited\n"
    state = json.loads(kept("git/state.json"))
    assert state["stage ran at"].startswith("0123456")
    assert state["tracked at"] == tracking.provenance.git_sha()
    assert state["changed"] is True
    assert run.data.tags["pat.rule"] == "train"
    assert run.data.tags["mlflow.runColor"].startswith("#")
    for item in run.inputs.dataset_inputs:
        columns = [each["name"] for each in json.loads(item.dataset.schema)["mlflow_colspec"]]
        assert columns == ["data_source", "ability"]


def run_again(tracked, arm):
    """Its files are written anew, a second later."""
    for path in (tracked.experiment / "train" / arm).iterdir():
        later = path.stat().st_mtime + 1
        os.utime(path, (later, later))


def test_a_stage_that_ran_again_keeps_its_earlier_runs_and_marks_them(tracked):
    tracked.track("hardware")
    first = tracked.track("train-tp1", {"train": {"lr": 1e-6}})
    for lr in (1e-5, 1e-4):
        run_again(tracked, "tp1")
        last = tracked.track("train-tp1", {"train": {"lr": lr}})
    names = ["hardware", "train-tp1", "train-tp1, earlier 1", "train-tp1, earlier 2"]
    assert tracked.runs() == [(name, "FINISHED") for name in names]
    current = tracked.client.search_runs([first.info.experiment_id], "tags.`pat.current` = 'yes'")
    assert {run.info.run_id: run.data.params.get("train.lr") for run in current if "train.lr" in run.data.params} == {
        last.info.run_id: "0.0001"
    }
    first = tracked.client.get_run(first.info.run_id)
    assert (first.info.run_name, first.data.params["train.lr"]) == ("train-tp1, earlier 1", "1e-06")
    assert first.data.tags["pat.current"] == "no"
    assert first.data.tags["mlflow.runColor"] == tracking.FADED != last.data.tags["mlflow.runColor"]
    history = tracked.client.get_metric_history(first.info.run_id, "gen/seconds")
    assert len(history) == len(GENERATION["tp1"])


def test_what_is_logged_twice_of_one_execution_is_there_once(tracked):
    first = tracked.track("train-tp1")
    tracked.track("train-tp1")
    assert tracked.runs() == [("train-tp1", "FINISHED")]
    assert tracked.client.get_run(first.info.run_id).info.lifecycle_stage == "deleted"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_error_leaves_the_earlier_run_and_no_half_one(tracked, monkeypatch, error):
    first = tracked.track("train-tp1")
    stamp = (tracked.experiment / "tracking" / "train-tp1.json").read_text()

    def fail(*_):
        raise error

    monkeypatch.setattr(tracking.Files, "add", fail)
    with pytest.raises(type(error)):
        tracked.track("train-tp1")
    assert tracked.runs() == [("train-tp1", "FINISHED")]
    assert tracked.client.get_run(first.info.run_id).info.lifecycle_stage == "active"
    assert (tracked.experiment / "tracking" / "train-tp1.json").read_text() == stamp


def test_an_experiment_is_taken_out_of_the_trash(tracked):
    run = tracked.track("hardware")
    tracked.client.delete_experiment(run.info.experiment_id)
    again = tracked.track("hardware")
    assert again.info.experiment_id == run.info.experiment_id
    assert tracked.client.get_experiment(run.info.experiment_id).lifecycle_stage == "active"


def test_many_and_long_settings_fit(tracked):
    run = tracked.track("hardware", {f"key{i}": "x" * 7000 for i in range(150)})
    assert len([key for key in run.data.params if key.startswith("key")]) == 150


@pytest.mark.parametrize("uri", ["results/mlruns", "file:///tmp/mlruns"])
def test_a_folder_is_refused_as_a_tracking_store(tracked, uri):
    with pytest.raises(ValueError, match=r"tracking\.uri.*sqlite"):
        tracking.run(tracked.experiment, "hardware", Target(uri, "x"), {}, tracked.experiment / "out.json")


def test_an_unfinished_stage_makes_no_run(tracked):
    tracked.track("hardware")
    with pytest.raises(FileNotFoundError, match="has not finished"):
        tracked.track("train-tp8")
    assert tracked.runs() == [("hardware", "FINISHED")]
