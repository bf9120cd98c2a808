"""What Slurm says of finished jobs, read from its words; a real Slurm is asked in tests/slurm."""

import json

import pytest

from pat import jobs


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:00:07", 7), ("01:02:03", 3723), ("2-01:00:00", 176400), ("05:06", 306)]
)
def test_duration(text, seconds):
    assert jobs.duration(text) == seconds


@pytest.mark.parametrize(
    ("tres", "count"),
    [
        ("billing=64,cpu=64,gres/gpu:h200=8,gres/gpu=8,mem=125G,node=2", 8),
        ("cpu=2,gres/gpu:a100=4", 4),
        ("cpu=2,mem=8G,node=1", 0),
        ("", 0),
    ],
)
def test_gpus_that_were_given(tres, count):
    assert jobs.gpus(tres) == count


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"TresPerJob": "gres:gpu:2"}, 2),  # Slurm 22.05
        ({"TresPerJob": "gres/gpu:h100:8"}, 8),  # later releases
        ({"TresPerNode": "gres:gpu:h200:4", "NumNodes": "2"}, 8),
        ({"TresPerNode": "gres/gpu=4", "NumNodes": "1"}, 4),
        ({"NumNodes": "1"}, 0),
    ],
)
def test_gpus_that_were_asked_for(fields, count):
    assert jobs.asked_gpus(fields) == count


def test_nothing_is_noted_outside_of_slurm(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    jobs.note(tmp_path, "train-pat")
    assert list(tmp_path.iterdir()) == []


def test_without_slurm_benchmarks_tell_the_time(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "assets.tsv").write_text("s\th:m:s\n12.5\t0:00:12\n")
    (tmp_path / "benchmarks" / "train-pat.tsv").write_text("s\th:m:s\n-\t-\n")
    (tmp_path / "benchmarks" / "config-assets.tsv").write_text("s\n0.1\n")
    rows = jobs.collect(tmp_path)
    assert json.loads((tmp_path / "jobs.json").read_text()) == rows
    assert {row["stage"]: row["elapsed_s"] for row in rows} == {"assets": 12.5, "train-pat": None}
    for row in rows:
        assert (row["slurm_job_id"], row["node"], row["state"], row["energy_j"]) == (None,) * 4
        assert row["source"] == "benchmark"


def test_energy_is_kept_where_accounting_measures_it(monkeypatch):
    line = "17|COMPLETED|3600|n[1-2]|cpu=64,gres/gpu=16,node=2|7200000\n"
    monkeypatch.setattr(jobs, "output", lambda *command: line)
    assert jobs.from_sacct(17) == {
        "state": "COMPLETED",
        "elapsed_s": 3600.0,
        "node": "n[1-2]",
        "gpus": 16,
        "energy_j": 7200000,
        "source": "sacct",
    }
    assert jobs.from_sacct(18) is None
