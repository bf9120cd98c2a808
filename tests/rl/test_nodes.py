"""Ray on the nodes of a job: what is said of a node that does not join, and that nothing is left running.

A script stands for Ray and for srun; the real ones run in tests/slurm.
"""

import sys
import time

import psutil
import pytest

from pat.rl import nodes
from pat.rl.nodes import NodesFailed
from tests.rl.test_processes import gone

# As pat.rl.ray_node: start ADDRESS RANKS FOLDER LOGS [--head], joined ADDRESS NODES. NODE, BEHAVIOUR: see `agents`.
AGENT = """
import json, os, socket, subprocess, sys, time
from pathlib import Path
command, address, *rest = sys.argv[1:]
here = Path(os.environ["TEST_FOLDER"])
if command == "joined":
    while True:
        there = sorted(file.stem for file in here.glob("*.joined"))
        print(json.dumps(there), flush=True)
        if len(there) == int(rest[0]):
            sys.exit()
        time.sleep(0.05)
name = os.environ.get("NODE", "pat1")
behaviour = os.environ.get("BEHAVIOUR_" + name, "join")
(here / (name + ".token")).write_text(Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text())
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", rest[1]])
(here / (name + ".pids")).write_text(f"{os.getpid()} {left.pid}")
if behaviour == "fail":
    (Path(rest[2]) / (name + ".log")).write_text("ValueError: no room for Ray here\\n")
    sys.exit(3)
if "--head" in rest and behaviour != "silent":
    door = socket.create_server(("", int(address.rpartition(":")[2])))
if behaviour in ("join", "deaf"):
    (here / (name + ".joined")).touch()
if behaviour == "deaf":
    time.sleep(600)
sys.stdin.read()
"""
SRUN = """#!/bin/sh
for word in "$@"; do case $word in --nodelist=*) export NODE=${word#*=};; esac; done
while case $1 in --*) true;; *) false;; esac; do shift; done
exec "$@"
"""


@pytest.fixture
def agents(tmp_path, monkeypatch):
    """agents(pat2="fail"): a job of pat1 (this node) and pat2, and what happens on each.

    join: Ray starts; fail: it ends at once; late: it starts and never joins; silent: a head that takes no connection;
    deaf: it does not end with its standard input.
    """
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setattr(nodes, "AGENT", (sys.executable, str(tmp_path / "agent.py")))
    monkeypatch.setattr(nodes, "JOIN_S", 30.0)
    monkeypatch.setattr(nodes, "POLL_S", 0.05)
    monkeypatch.setattr(nodes.slurm_job, "nodes", lambda wanted: ["pat1", "pat2"][:wanted])
    monkeypatch.setattr(nodes, "_own_address", lambda: "127.0.0.1")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TEST_FOLDER": str(tmp_path)}

    def start(**behaviours):
        environment = {f"BEHAVIOUR_{name}": behaviour for name, behaviour in behaviours.items()}
        monkeypatch.setenv("PATH", variables["PATH"])
        return nodes.started(2, 4, tmp_path / "logs", variables | environment)

    return start


def pids(tmp_path) -> list[int]:
    return [int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()]


def test_all_nodes_join_with_one_token_of_their_own_and_end_with_the_block(agents, tmp_path):
    with agents() as ray:
        host, port = ray.address.split(":")
        assert host == "127.0.0.1"
        tokens = {(tmp_path / f"pat{n}.token").read_text() for n in (1, 2)}
        assert len(tokens) == 1
        assert len(tokens.pop()) == 64
        assert (tmp_path / "logs" / "token").stat().st_mode & 0o777 == 0o600
        assert ray.variables["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "logs" / "token")
        assert len(pids(tmp_path)) == 4
        assert all(psutil.pid_exists(pid) for pid in pids(tmp_path))
        ray.check()
    assert int(port) > 0
    assert all(gone(pid) for pid in pids(tmp_path))
    assert not (tmp_path / "logs" / "token").exists()


def test_a_node_on_which_ray_fails_is_named_with_its_log(agents, tmp_path):
    with pytest.raises(NodesFailed) as error, agents(pat2="fail"):
        pytest.fail("the block was entered")
    text = str(error.value)
    assert text.startswith("Ray did not start on pat2;")
    assert "ValueError: no room for Ray here" in text
    assert str(tmp_path / "logs") in text
    assert all(gone(pid) for pid in pids(tmp_path))


def test_a_node_that_does_not_join_is_named_at_the_deadline(agents, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "JOIN_S", 3.0)
    with pytest.raises(NodesFailed, match=r"^no Ray on pat2 within 3 s;"), agents(pat2="late"):
        pytest.fail("the block was entered")
    assert len(pids(tmp_path)) == 4
    assert all(gone(pid) for pid in pids(tmp_path))


def test_a_head_that_takes_no_connection_is_named(agents, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "JOIN_S", 1.0)
    with pytest.raises(NodesFailed, match=r"^no Ray on pat1, pat2 within 1 s;"), agents(pat1="silent"):
        pytest.fail("the block was entered")
    assert all(gone(pid) for pid in pids(tmp_path))


def test_a_node_that_is_lost_in_training_is_named(agents, tmp_path):
    with agents() as ray:
        agent = psutil.Process(int((tmp_path / "pat2.pids").read_text().split()[0]))
        agent.kill()
        assert gone(agent.pid)
        deadline = time.monotonic() + 30
        with pytest.raises(NodesFailed, match=r"^Ray on pat2 has ended with status -9;"):
            while time.monotonic() < deadline:
                ray.check()
                time.sleep(0.02)
    assert all(gone(pid) for pid in pids(tmp_path))


def test_a_node_that_does_not_listen_is_ended_all_the_same(agents, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "END_S", 0.5)
    with agents(pat2="deaf"):
        assert len(pids(tmp_path)) == 4
    assert all(gone(pid) for pid in pids(tmp_path))
