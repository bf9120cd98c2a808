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
