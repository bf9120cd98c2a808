"""One node's part of a training's Ray: started on every node, it ends with its standard input, and Ray with it.

    python -m pat.rl.ray_node start ADDRESS RANKS FOLDER LOGS [--head]    (Ray 2.60)
    python -m pat.rl.ray_node joined ADDRESS NODES                        (waits; prints who is there, a line a change)

Standard input comes from the training (``pat.rl.guard``), through srun to other nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from pat import home
from pat.rl import guard, processes

POLL_S = 0.2


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def ray_start(address: str, ranks: int, folder: Path, head: bool) -> list[str]:
    """The command of one node. CPUs are logical: verl's actors ask for some each, and mostly wait."""
    host, _, port = address.rpartition(":")
    place = ["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
    place += [f"--ray-client-server-port={free_port()}"]
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
        *(place if head else [f"--address={address}"]),
        f"--node-name={node_name()}",
        f"--num-gpus={ranks}",  # logical ones without an accelerator
        f"--num-cpus={max(os.cpu_count(), 4 * ranks)}",
        f"--temp-dir={folder}",
        # Free ports instead of Ray's usual ones, which another job on this node may have.
        *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
    ]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def start(address: str, ranks: int, folder: Path, logs: Path, head: bool) -> int:
    """Run Ray on this node, its output in ``logs``, until standard input or Ray ends. Returns Ray's exit status."""
    home.ensure()
    command = ray_start(address, ranks, folder, head)
    with (logs / f"{node_name()}.log").open("wb") as log:
        return guard.run(command, str(folder), env=processes.one_vendor(), stdout=log, stderr=subprocess.STDOUT)


def joined(address: str, nodes: int) -> None:
    import ray

    ray.init(address=address, logging_level="error", log_to_driver=False)
    told: list[str] = []
    while len(told) < nodes:
        names = sorted(node["NodeName"] for node in ray.nodes() if node["Alive"])
        if names != told:
            told = names
            print(json.dumps(told), flush=True)
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("start")
    one.add_argument("address")
    one.add_argument("ranks", type=int)
    one.add_argument("folder", type=Path)
    one.add_argument("logs", type=Path)
    one.add_argument("--head", action="store_true")
    everyone = commands.add_parser("joined")
    everyone.add_argument("address")
    everyone.add_argument("nodes", type=int)
    arguments = vars(parser.parse_args())
    if arguments.pop("command") == "start":
        sys.exit(start(**arguments))
    joined(**arguments)


if __name__ == "__main__":
    main()
