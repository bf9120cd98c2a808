"""What differs on a cluster with accounting."""

import json
import time

import pytest

from pat import jobs
from tests.slurm import cluster as slurm


@pytest.fixture(scope="module")
def cluster():
    if (reason := slurm.unavailable(accounting=True)) is not None:
        pytest.skip(reason)
    with slurm.running(nodes=1, gpus=2, accounting=True) as started:
        yield started


def submit(cluster, *options: str) -> int:
    return int(
        cluster.run("sbatch", "--parsable", "--output=/dev/null", *options, "--account=pat", "--wrap", "sleep 1")
    )


def test_sacct_tells_time_node_and_gpus(cluster, tmp_path):
    number = submit(cluster, "--gpus=h200:2")
    end = time.monotonic() + 60
    while (told := jobs.from_sacct(number) or {}).get("state") != "COMPLETED":
        assert time.monotonic() < end, told
        time.sleep(0.5)
    assert told["elapsed_s"] >= 1
    assert (told["node"], told["gpus"], told["source"]) == ("pat1", 2, "sacct")
    assert told["energy_j"] is None  # nothing measures it here
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "profile.tsv").write_text("s\n0.5\n")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "profile.json").write_text(json.dumps({"slurm_job_id": number, "node": "somewhere"}))
    (row,) = jobs.collect(tmp_path)
    assert row == {"stage": "profile", "slurm_job_id": number} | told


def test_a_job_that_was_never_there(cluster):
    assert jobs.from_sacct(999999) is None
