"""Real verl with a rollout that does not deliver: the job ends with the reason instead of training on a part."""

import subprocess
import sys

import pytest
import yaml

from pat import configfile
from pat.assets import run as make_assets
from pat.config import stage_config
from tests.workflow.project import ROOT

pytestmark = [pytest.mark.training, pytest.mark.engine, pytest.mark.slow]


def test_requests_that_miss_the_deadline_end_the_job_with_their_number(tmp_path):
    # One response of 900 tokens among short ones: seconds at any speed that this model can have here.
    raw = yaml.safe_load((ROOT / "config" / "ci.yaml").read_text())
    raw["rollout"] |= {"max_response": 900, "lengths": [4] * 15 + [900], "deadline_s": 2}
    file = tmp_path / "late.yaml"
    file.write_text(yaml.safe_dump(raw))
    make_assets(stage_config(configfile.load(file)["ci-qwen3"], "assets"), tmp_path)
    command = [sys.executable, "-m", "pat.cli", "train", "--arm", "tp1", "--config", str(file)]
    done = subprocess.run(
        [*command, "--experiment", "ci-qwen3", "--out", str(tmp_path)], capture_output=True, text=True, timeout=400
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "iteration 1: 1 of 16 requests failed, first: no answer within 2 s (deadline_s)" in output
    assert str(tmp_path / "train" / "tp1" / "log.txt") in output
    assert not (tmp_path / "train" / "tp1" / "iterations.parquet").exists()
