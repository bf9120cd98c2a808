"""What docs/results.md tells people to type, and the files that it names."""

import re
import subprocess
import sys

import pytest

from tests.workflow.project import ROOT, copy_project

TEXT = (ROOT / "docs" / "results.md").read_text()
COMMANDS = re.findall(r"^    (?:MLFLOW_TRACKING_URI=\S+ )?(snakemake .+)$", TEXT, re.M)


@pytest.mark.workflow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_plan(command, tmp_path):
    # Snakemake's own report of finished results is made in tests/workflow/test_dryrun.py.
    words = [word for word in command.split() if word not in ("--report", "results/report.zip")]
    done = subprocess.run(
        [sys.executable, "-m", *words, "-n"], cwd=copy_project(tmp_path), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MLflow, report" in done.stdout


def test_the_names_in_it_exist():
    assert len(COMMANDS) == 3
    code = "".join((ROOT / "pat" / name).read_text() for name in ("tracking.py", "facts.py", "rl/train.py"))
    for name in ("pat.stage", "pat.rule", "environment/packages.txt", "git/", "gen/median_seconds", "usage.parquet"):
        assert name in TEXT
        assert name in code
