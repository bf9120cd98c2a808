"""Ray on every node of a training's Slurm job: started, all there within a deadline, watched, and ended."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pat.logged import telling_lines
from pat.rl import job, processes, ray_node, slurm_job

POLL_S = 0.2
JOIN_S = 180.0  # longest that Ray may take to start on all nodes, seconds; a shared file system may be slow
END_S = 20.0  # longest that it may take to end on them when asked
AGENT = (sys.executable, "-m", "pat.rl.ray_node")


class NodesFailed(RuntimeError):
    """Ray did not start on a node, or has ended on one."""


@contextlib.contextmanager
def started(nodes: int, ranks: int, logs: Path, variables: Mapping[str, str]) -> Iterator[Nodes]:
    """Ray of ``ranks`` ranks on each of ``nodes`` nodes of this Slurm job; it ends with the block.

    logs: a folder that all nodes see, for one log a node. variables: the environment of Ray's processes.
    Raises ConfigError outside of such a job, NodesFailed naming the nodes that are not there in time.
    """
    names = slurm_job.nodes(nodes)
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    token = logs.absolute() / "token"
    ray = Nodes(names, ranks, logs.absolute(), job.with_token(variables, token))
    try:
        ray.start()
        yield ray
    finally:
        ray.end()
        token.unlink()


class Nodes:
    """address: HOST:PORT for ``ray.init``; variables: the environment of a driver that may connect to it."""

    def __init__(self, names: list[str], ranks: int, logs: Path, variables: dict[str, str]) -> None:
        self.names, self.ranks, self.logs, self.variables = names, ranks, logs, variables
        self.address = f"{_own_address()}:{ray_node.free_port()}"
        self._folder = tempfile.mkdtemp(prefix="pat-ray-", dir="/tmp")  # short: sockets in it have long names
        self._agents: dict[str, subprocess.Popen] = {}  # by the nodes that it stands for

    def start(self) -> None:
        deadline = time.monotonic() + JOIN_S
        own, others = self.names[0], self.names[1:]
        start = [*AGENT, "start", self.address, str(self.ranks), self._folder, str(self.logs)]
        self._launch(own, [*start, "--head"], self.variables)
        while not self._listens():
            self._wait(deadline, [])
        self._launch(", ".join(others), slurm_job.srun(others, start), slurm_job.outside_of_step(self.variables))
        with (self.logs / "joined").open("wb+") as told:
            waiting = subprocess.Popen(
                [*AGENT, "joined", self.address, str(len(self.names))],
                env=self.variables,
                stdout=told,
                stderr=subprocess.DEVNULL,
                preexec_fn=processes.end_with_parent,
            )
            try:
                while waiting.poll() is None:
                    self._wait(deadline, self._joined())
            finally:
                processes.end(processes.tree(waiting.pid), grace_s=0.5)
        if waiting.returncode:
            raise self._failed(f"Ray's head on {own} takes no connection", [own])

    def check(self) -> None:
        """Raise NodesFailed if Ray has ended on a node."""
        for names, agent in self._agents.items():
            if agent.poll() is not None:
                raise self._failed(f"Ray on {names} has ended with status {agent.returncode}", names.split(", "))

    def end(self) -> None:
        """End Ray on all nodes, and here what may be left of it."""
        for agent in reversed(self._agents.values()):
            with contextlib.suppress(OSError):
                agent.stdin.close()
        for agent in reversed(self._agents.values()):
            try:
                agent.wait(END_S)
            except subprocess.TimeoutExpired:
                processes.end(processes.tree(agent.pid), grace_s=processes.END_S)  # srun ends its step when it is asked
        processes.end(processes.naming(self._folder), grace_s=0.5)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _launch(self, names: str, command: list[str], variables: dict[str, str]) -> None:
        with (self.logs / f"launch-{len(self._agents)}.log").open("wb") as log:
            # A session of its own: Ctrl-C reaches the training alone, which ends verl first.
            self._agents[names] = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _listens(self) -> bool:
        host, _, port = self.address.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return True
        return False

    def _joined(self) -> list[str]:
        lines = (self.logs / "joined").read_text(encoding="utf-8").split("\n")[:-1]
        return json.loads(lines[-1]) if lines else []

    def _wait(self, deadline: float, joined: list[str]) -> None:
        for names, agent in self._agents.items():
            if agent.poll() is not None:
                ended = [name for name in names.split(", ") if name not in joined] or names.split(", ")
                raise self._failed(f"Ray did not start on {', '.join(ended)}", ended)
        missing = [name for name in self.names if name not in joined]
        if time.monotonic() > deadline:
            raise self._failed(f"no Ray on {', '.join(missing)} within {JOIN_S:.0f} s", missing)
        time.sleep(POLL_S)

    def _failed(self, what: str, names: list[str]) -> NodesFailed:
        files = [file for name in names if (file := self.logs / f"{name}.log").exists()]
        files += sorted(self.logs.glob("launch-*.log"))
        texts = [file.read_text(errors="replace", encoding="utf-8") for file in files]
        lines = [line for text in texts if text.strip() for line in telling_lines(text, most=6)]
        return NodesFailed("\n  ".join([f"{what}; what matters of the logs:", *lines]) + f"\nThe logs: {self.logs}")


def _own_address() -> str:
    """This node's address as others reach it."""
    import ray.util

    return ray.util.get_node_ip_address()
