"""The command line: which configuration a stage gets, where it writes, how mistakes end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pat import cli, cluster
from pat.problems import ConfigError

ROOT = Path(__file__).parents[1]
CI = str(ROOT / "config" / "ci.yaml")


def invoke(*arguments: str):
    return CliRunner().invoke(cli.app, arguments, catch_exceptions=False)


@pytest.fixture
def hardware(monkeypatch, tmp_path):
    """Stands in for the hardware stage and notes where it was to write."""
    monkeypatch.chdir(tmp_path)
    places = []
    monkeypatch.setattr(cluster, "run", places.append)
    return places


def test_experiment_of_a_yaml_file(hardware):
    assert invoke("hardware", "--config", CI, "--experiment", "ci-llama").exit_code == 0
    assert hardware == [Path("results/ci-llama")]
    assert hardware[0].is_dir()


def test_file_of_several_experiments_wants_a_name(hardware):
    with pytest.raises(ConfigError, match="--experiment: got nothing; allowed: one of ci-qwen3, ci-llama"):
        invoke("hardware", "--config", CI)
    assert hardware == []


def test_stage_file_knows_its_experiment(hardware, tmp_path):
    path = tmp_path / "results" / "mine" / "config" / "hardware.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert invoke("hardware", "--config", str(path)).exit_code == 0
    assert invoke("hardware", "--config", str(path), "--out", str(tmp_path / "else")).exit_code == 0
    assert hardware == [tmp_path / "results" / "mine", tmp_path / "else"]


def test_track_passes_what_the_stage_read(monkeypatch, tmp_path):
    from pat import tracking

    calls = []
    monkeypatch.setattr(tracking, "run", lambda *arguments: calls.append(arguments))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "train-pat.json").write_text(json.dumps({"seed": 3}))
    (tmp_path / "config" / "tracking.json").write_text(json.dumps({"tracking": {"uri": "u", "artifacts": "a"}}))
    assert invoke("track", "--stage", "train-pat", "--config", str(tmp_path / "config/tracking.json")).exit_code == 0
    ((folder, stage, cfg, params, out),) = calls
    assert (folder, stage, cfg.uri, params) == (tmp_path, "train-pat", "u", {"seed": 3})
    assert out == tmp_path / "tracking" / "train-pat.json"


def test_check_warns(tmp_path):
    path = tmp_path / "wide.yaml"
    path.write_text(Path(CI).read_text().replace("ranks: 2", "ranks: 4096").replace("[1, 2]", "[1]"))
    text = path.read_text().replace("arms: [tp1, tp2, pat]", "arms: [tp1]").replace("arms: [tp1, pat]", "arms: [tp1]")
    path.write_text(text.replace("prompts: 4", "prompts: 4096").replace("train_size: 16", "train_size: 4096"))
    result = invoke("check", "--config", str(path))
    assert result.exit_code == 0
    assert "warning: ranks: 4096" in result.output
    assert "ci-qwen3: arms tp1" in result.output


def test_schema_is_json():
    assert "experiments" in json.loads(invoke("schema").stdout)["properties"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--config", "/no/such.yaml"], "config error: --config: got '/no/such.yaml'"),
        (
            ["train", "--arm", "tp7", "--config", CI, "--experiment", "ci-llama"],
            "config error: --arm: got 'tp7'",
        ),
        (
            ["simulate", "--config", CI, "--experiment", "ci-llama", "--out", "/tmp/pat-none"],
            "config error: --out: got /tmp/pat-none/predictor/model.json",
        ),
        (
            ["train", "--arm", "up", "--config", CI, "--experiment", "ci-llama"],
            "config error: --arm: got 'up'",
        ),
        (["assets", "--config", "/no/such.json"], "config error: --config: got '/no/such.json'"),
    ],
)
def test_mistakes_end_with_status_2_and_no_traceback(tmp_path, arguments, message):
    command = [sys.executable, "-m", "pat.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_logged_stage_keeps_status_and_output(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pat.cli",
        "logged",
        str(tmp_path / "log"),
        "check",
        "--config",
        "/no.yaml",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert (tmp_path / "log").read_text() == done.stdout
    assert "pat check --config /no.yaml failed (exit status 2)" in done.stderr
