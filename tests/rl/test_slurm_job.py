"""Which nodes a training may use, as Slurm tells; its commands are doubles here, the real ones run in tests/slurm."""

import os

import pytest

from pat.problems import ConfigError
from pat.rl import slurm_job


@pytest.fixture
def in_job(tmp_path, monkeypatch):
    """in_job(squeue, scontrol): this process runs on pat2 in job 77, and Slurm's commands are these scripts."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)

    def start(
        squeue="echo 76 pat9; echo '77 pat[1-3]'", scontrol='[ "$3" = "pat[1-3]" ] && printf "pat1\\npat2\\npat3"'
    ):
        for name, script in (("squeue", squeue), ("scontrol", scontrol)):
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        monkeypatch.setenv("SLURMD_NODENAME", "pat2")

    return start


def test_the_own_node_comes_first(in_job):
    in_job()
    assert slurm_job.nodes(3) == ["pat2", "pat1", "pat3"]
    assert slurm_job.nodes(2) == ["pat2", "pat1"]


def test_outside_of_slurm_it_is_said_how(in_job):
    with pytest.raises(ConfigError) as error:
        slurm_job.nodes(2)
    (line,) = str(error.value).splitlines()
    assert line.startswith("config error: train.nodes: got 2; allowed: 1, unless")
    assert "snakemake --profile slurm" in line


def test_where_salloc_has_left_it_on_the_login_node_it_is_said_how(in_job, monkeypatch):
    in_job()
    monkeypatch.delenv("SLURMD_NODENAME")
    with pytest.raises(ConfigError, match=r"unless it runs on a node of a Slurm job.*`srun -N1 -n1`"):
        slurm_job.nodes(2)


def test_too_small_a_job_is_named_with_its_nodes(in_job):
    in_job()
    with pytest.raises(ConfigError, match=r"train\.nodes: got 4.*Slurm job 77, which has 3: pat1, pat2, pat3"):
        slurm_job.nodes(4)


def test_what_slurm_complains_of_is_passed_on(in_job):
    in_job(squeue="echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"`squeue --noheader.*Unable to contact slurm controller"):
        slurm_job.nodes(2)


def test_a_step_on_other_nodes_leaves_the_training_its_resources(in_job):
    in_job()
    command = slurm_job.srun(["pat1", "pat3"], ["python", "-c", "pass"])
    assert command[-3:] == ["python", "-c", "pass"]
    assert {"--overlap", "--jobid=77", "--nodelist=pat1,pat3", "--nodes=2", "--ntasks=2"} <= set(command)


def test_srun_does_not_learn_the_size_of_the_present_step():
    inherited = {
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "1",
        "SRUN_CPUS_PER_TASK": "2",
        "SLURM_CONF": "/x",
        "PATH": "/bin",
    }
    assert slurm_job.outside_of_step(inherited) == {"SLURM_CONF": "/x", "PATH": "/bin"}
