"""What the README tells people to type works."""

import re
import subprocess
import sys

import pytest

from tests.workflow.project import ROOT

README = (ROOT / "README.md").read_text()


def test_every_make_target_exists():
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake (\w[\w-]*)", README))
    assert {"all", "test", "ui"} <= named <= targets


def test_every_pat_command_exists():
    named = set(re.findall(r"`(?:\.venv/bin/)?pat ([a-z]+)", README))
    assert "doctor" in named
    for command in named:
        done = subprocess.run([sys.executable, "-m", "pat.cli", command, "--help"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_every_linked_file_exists():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("command", re.findall(r"snakemake --profile (?:local|slurm)[^`\n]*", README))
def test_every_snakemake_command_plans(command, tmp_path):
    from tests.workflow.project import copy_project

    words = command.replace("my-cluster", "ci").split()
    words += [] if "-n" in words else ["-n"]
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=copy_project(tmp_path), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.engine
def test_the_engine_example_runs(tmp_path):
    from pat import configfile
    from pat.assets import run
    from pat.config import stage_config

    run(stage_config(configfile.load(ROOT / "config" / "ci.yaml")["ci-qwen3"], "assets"), tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example.replace("results/smollm2-gsm/model", str(tmp_path / "model")))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Layout(ranks=2, tp=2)" in done.stdout
