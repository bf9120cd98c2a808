"""Training on two nodes of a Slurm job: Ray on each, a server on each, and nothing left on any."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import psutil
import pytest

from tests.rl import jobs
from tests.rl.test_processes import gone
from tests.workflow.project import ROOT

pytestmark = [pytest.mark.training, pytest.mark.engine, pytest.mark.workflow, pytest.mark.slow]
DEADLINE_S = 500.0


DOCS = (ROOT / "docs" / "training.md").read_text()
(SBATCH,) = re.findall(r"^    (sbatch .*)$", DOCS, re.M)  # what the documentation tells people to type


def batch(folder, command=None) -> tuple[int, str]:
    """That line in ``folder``, with ``command`` in place of `pat train`'s if there is one: exit status and output."""
    (training,) = re.findall(r"pat train [^\"]*", SBATCH)
    line = SBATCH.replace(training, command or training)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, timeout=DEADLINE_S)
    (log,) = folder.glob("slurm-*.out")
    return done.returncode, log.read_text()


def left(folder) -> list[int]:
    """Processes of the job that ran in ``folder``, on any node of the cluster: all are on this machine."""
    (job,) = re.findall(r"slurm-(\d+)\.out", " ".join(file.name for file in folder.iterdir()))
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            said = process.environ()
            if (said.get("SLURM_JOB_ID"), said.get("SLURM_CONF")) == (job, os.environ["SLURM_CONF"]):
                found.append(process.pid)
    return found


def test_two_nodes_train_together_and_each_decides_by_itself(cluster, tmp_path):
    # Dealt in turn, a long one to each server.
    lengths = [8, 8, 10, 12, 12, 14, 16, 16, 18, 20, 10, 12, 8, 10, 150, 160]
    rollout = {"lengths": lengths, "max_response": 160, "deadline_s": 240}
    jobs.prepare(tmp_path, rollout=rollout, train={"nodes": 2, "micro_batch": 2})
    status, told = batch(tmp_path)
    assert status == 0, told
    assert all(gone(pid) for pid in left(tmp_path))
    out = tmp_path / "train" / "pat"
    run = json.loads((out / "run.json").read_text())
    assert (run["nodes"], run["config"]["train"]["nodes"]) == (2, 2)

    requests = pl.read_parquet(out / "requests.parquet")
    shares = requests.group_by("iteration", "server").agg(pl.col("response_tokens").sort()).sort("iteration", "server")
    even, odd = [8, 8, 10, 10, 12, 16, 18, 150], [8, 10, 12, 12, 14, 16, 20, 160]
    assert shares.rows() == [(n, server, lengths) for n in (1, 2) for server, lengths in ((0, even), (1, odd))]
    assert requests["seed"].n_unique() == 2 * 16

    switches = pl.read_parquet(out / "switches.parquet").filter(pl.col("unfinished") > 0)
    iterations = pl.read_parquet(out / "iterations.parquet")
    assert iterations["switches"].to_list() == [switches.filter(iteration=n).height for n in (1, 2)]
    for row in iterations.iter_rows(named=True):
        spent = [switches.filter(iteration=row["iteration"], server=n)["total_s"].sum() for n in (0, 1)]
        assert row["switch_s"] == pytest.approx(max(spent))
        assert row["decision_s"] > 0
    # The generation of an iteration is that of the server that ends last, on the clock of all machines.
    last = requests.group_by("iteration").agg(pl.col("finish_s").max()).sort("iteration")["finish_s"].to_list()
    assert all(gen_s >= end_s for gen_s, end_s in zip(iterations["gen_s"], last, strict=True))
    decode = pl.read_parquet(out / "decode.parquet")
    assert set(decode["server"]) == {0, 1}


# In place of Ray on the other node, something that stays and never joins.
NEVER_JOINS = """
import os, sys
from pathlib import Path
from pat.rl import job, nodes, slurm_job
nodes.JOIN_S, nodes.END_S, srun = 25.0, 3.0, slurm_job.srun
slurm_job.srun = lambda names, command: srun(names, ["sh", "-c", f"echo $$ > {sys.argv[1]}/stays; exec sleep 600"])
with nodes.started(2, 2, Path(sys.argv[1]) / "ray", job.variables(Path(sys.argv[1]), 2)):
    print("all joined")
"""


def script(folder, code) -> str:
    (folder / "script.py").write_text(code)
    return f"python script.py {folder}"


def test_a_node_that_does_not_join_is_named_and_nothing_stays(cluster, tmp_path):
    status, told = batch(tmp_path, script(tmp_path, NEVER_JOINS))
    assert status != 0
    assert "NodesFailed: no Ray on pat2 within 25 s" in told
    assert str(tmp_path / "ray") in told
    assert "all joined" not in told
    assert gone(int((tmp_path / "stays").read_text()))
    assert all(gone(pid) for pid in left(tmp_path))


def test_too_small_a_job_is_refused_before_anything_starts(cluster, tmp_path):
    status, told = batch(tmp_path, script(tmp_path, NEVER_JOINS.replace("started(2, 2", "started(3, 2")))
    assert status != 0
    assert "train.nodes: got 3; allowed: at most the nodes of Slurm job" in told
    assert "which has 2: pat1, pat2" in told
