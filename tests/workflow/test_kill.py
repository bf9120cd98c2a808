"""A local Snakemake that is killed leaves nothing running, and the same command goes on where it was."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.rl.endings import DEADLINE_S, gone
from tests.workflow.project import copy_project

pytestmark = [pytest.mark.workflow, pytest.mark.engine]
SNAKEMAKE = [sys.executable, "-m", "snakemake", "--configfile", "config/small.yaml", "--profile", "local"]
GOAL = "results/small/profile/machine.json"


@pytest.fixture
def project(tmp_path) -> Path:
    """config/ci.yaml with one tiny model, and a profile that takes some seconds after the start of the engine."""
    folder = copy_project(tmp_path)
    raw = yaml.safe_load((folder / "config" / "ci.yaml").read_text())
    raw |= {"experiments": {"small": {}}, "arms": []}
    raw["profile"] |= {"batches": [1, 2], "contexts": [16], "prefill": [8], "steps": 4, "repeats": 4}
    (folder / "config" / "small.yaml").write_text(yaml.safe_dump(raw))
    return folder


def measured(project: Path) -> list[str]:
    """The points of the profile that have been kept so far."""
    partial = project / "results" / "small" / "profile" / "partial.jsonl"
    lines = partial.read_text().split("\n")[1:-1] if partial.exists() else []
    return [json.loads(line)["key"] for line in lines]


def test_a_killed_snakemake_leaves_no_engine_and_no_point_is_measured_twice(project):
    command = subprocess.Popen(
        [*SNAKEMAKE, GOAL], cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 240
    while len(measured(project)) < 2:
        assert command.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    family = [each.pid for each in psutil.Process(command.pid).children(recursive=True)]
    assert len(family) >= 5  # a shell, pat twice, and the engine's processes
    os.kill(command.pid, signal.SIGKILL)
    command.wait(DEADLINE_S)
    assert all(gone(pid) for pid in family)
    kept = measured(project)
    subprocess.run([*SNAKEMAKE, "--unlock"], cwd=project, check=True, capture_output=True)
    done = subprocess.run([*SNAKEMAKE, GOAL], cwd=project, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    log = (project / "results" / "small" / "logs" / "profile.log").read_text()
    assert f"{len(kept)} of them were measured before an interruption" in log
    assert re.search(r"profile \[(\d+)/", log)[1] == str(len(kept) + 1)
    assert not measured(project)  # all is in the tables
