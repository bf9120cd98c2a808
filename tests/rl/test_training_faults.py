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


def failed(folder, raw) -> str:
    """What `pat train` says of a training that fails, with the configuration ``raw``."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(raw))
    make_assets(stage_config(configfile.load(file)["ci-qwen3"], "assets"), folder)
    command = [sys.executable, "-m", "pat.cli", "train", "--arm", "tp1", "--config", str(file)]
    done = subprocess.run(
        [*command, "--experiment", "ci-qwen3", "--out", str(folder)], capture_output=True, text=True, timeout=400
    )
    assert done.returncode != 0
    assert not (folder / "train" / "tp1" / "iterations.parquet").exists()
    output = done.stdout + done.stderr
    assert str(folder / "train" / "tp1" / "log.txt") in output
    return output


def test_requests_that_miss_the_deadline_end_the_job_with_their_number(tmp_path):
    # One response of 900 tokens among short ones: seconds at any speed that this model can have here.
    raw = yaml.safe_load((ROOT / "config" / "ci.yaml").read_text())
    raw["rollout"] |= {"max_response": 900, "lengths": [4] * 15 + [900], "deadline_s": 2}
    output = failed(tmp_path, raw)
    assert "iteration 1: 15 of 16 samples can be trained on" in output
    assert "TimeoutError: no answer within 2 s (deadline_s)" in output


REWARD = """
import threading
lock, calls = threading.Lock(), iter(range(10**6))

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    with lock:
        call = next(calls)
    if call % 4 == 3:
        raise KeyError(f"no judge for {ground_truth}")
    return float(call % 2)
"""


def test_samples_without_a_reward_end_the_job_with_their_number_and_the_reason(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    raw = yaml.safe_load((ROOT / "config" / "ci.yaml").read_text())
    raw["train"]["extra"] = {"reward.custom_reward_function.path": str(tmp_path / "mine.py")}
    output = failed(tmp_path, raw)
    assert "iteration 1: 12 of 16 samples can be trained on" in output
    assert "KeyError: 'no judge for " in output
