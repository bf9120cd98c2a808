"""Real verl, killed in the middle of a training: started again it goes on from its last checkpoint."""

import json
import os
import time

import polars as pl
import psutil
import pytest

from pat.rl import resume
from tests.rl import jobs
from tests.rl.test_processes import gone

pytestmark = [pytest.mark.training, pytest.mark.engine, pytest.mark.slow]
DEADLINE_S = 400.0


def test_a_killed_training_goes_on_from_its_checkpoint_and_draws_what_it_would_have_drawn(tmp_path):
    rollout = {"lengths": None, "max_response": 64, "deadline_s": 200}  # natural lengths: they follow from the weights
    file = jobs.prepare(tmp_path, rollout=rollout, train={"iterations": 3, "save_every": 1, "lr": 1e-2})
    out, checkpoints, log = tmp_path / "train" / "pat", resume.folder(tmp_path, "pat"), tmp_path / "output.txt"

    # Killed while iteration 2 trains: it has been generated, and only iteration 1 is recorded and saved.
    training = jobs.start(jobs.train(file), log)
    second = out / "rollout" / "000002-000.json"
    deadline = time.monotonic() + DEADLINE_S
    while not second.exists():
        assert training.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    started = psutil.Process(training.pid).children(recursive=True)
    training.kill()
    training.wait()
    assert all(gone(process.pid) for process in started)
    before = requests_of(second)
    assert not (checkpoints / "global_step_2").exists() or not (out / "iterations.parquet").exists()

    # Ray, datasets and compilers keep files at home, where one cannot always write.
    again = jobs.start(jobs.train(file), log, env=os.environ | {"HOME": "/dev/null/nowhere"})
    assert again.wait(DEADLINE_S) == 0, log.read_text()
    told = log.read_text()
    assert "pat: 1 of 3 iterations are there already" in told
    assert [told.count(f"pat [{n}/3] took") for n in (1, 2, 3)] == [1, 1, 1]

    iterations = pl.read_parquet(out / "iterations.parquet")
    assert iterations.select("iteration", "samples", "warm_up").rows() == [(1, 16, True), (2, 16, True), (3, 16, False)]
    assert iterations["save_s"].null_count() == 0
    assert json.loads((out / "run.json").read_text())["starts"] == [0, 1]
    # The same seeds and, from the same weights and optimizer state, responses of the same lengths.
    requests = pl.read_parquet(out / "requests.parquet")
    after = requests.filter(pl.col("iteration") == 2).select("seed", "prompt_tokens", "response_tokens").rows()
    assert sorted(after) == before
    assert len({tokens for *_, tokens in before}) > 2  # else they would say nothing of the weights
    assert requests["seed"].n_unique() == 3 * 16
    assert not checkpoints.exists()


def requests_of(record) -> list[tuple[int, int, int]]:
    requests = json.loads(record.read_text())["requests"]
    return sorted((request["seed"], request["prompt_tokens"], request["response_tokens"]) for request in requests)
