"""Stage ``hardware``: what PAT runs on, asked from Slurm where there is one, else from this machine."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

MIB = 1 << 20
PACKAGES = ("torch", "sglang", "verl", "ray", "transformers")

# pyslurm 24.11/25.11: configured_gres is {"gpu:h200": 8}, real_memory is in MiB.
_PYSLURM = """
import json, pyslurm
print(json.dumps([[n.name, n.total_cpus, n.real_memory, n.configured_gres or {},
                   n.partitions or [], n.available_features or []]
                  for n in pyslurm.Nodes.load().values()]))
"""


def output(*command: str, timeout_s: float = 20.0) -> str | None:
    """What ``command`` prints; None if it is not installed, fails or takes longer than ``timeout_s`` seconds."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, encoding="utf-8", errors="replace"
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def _node(
    name: str,
    cpus: int,
    memory_bytes: int,
    devices: list,
    links: str | None = None,
    partitions: Iterable[str] = (),
    features: Iterable[str] = (),
    driver: str | None = None,
) -> dict[str, Any]:
    node = {"name": name, "cpus": cpus, "memory_bytes": memory_bytes, "devices": devices, "links": links}
    return node | {"driver": driver} | {"partitions": sorted(partitions), "features": sorted(features)}


def _gpus(name: str, count: int) -> list[dict[str, Any]]:
    return [{"kind": "gpu", "name": name, "memory_bytes": None} for _ in range(count)]


def from_pyslurm() -> list[dict[str, Any]] | None:
    """Nodes by pyslurm, None where it is absent or of another Slurm release.

    In a process of its own: without a Slurm configuration the library ends the interpreter that imports it.
    """
    text = output(sys.executable, "-c", _PYSLURM)
    if text is None:
        return None
    nodes = []
    for name, cpus, memory_mib, gres, partitions, features in json.loads(text):
        devices = []
        for kind, count in gres.items():
            if kind.partition(":")[0] == "gpu":
                devices += _gpus(kind.partition(":")[2] or "gpu", int(count))
        nodes.append(_node(name, cpus, memory_mib * MIB, devices, None, partitions, features))
    return nodes


def pyslurm_mismatch() -> tuple[str, str] | None:
    """Why an installed pyslurm cannot be used with this Slurm, and what helps; None if there is nothing to say."""
    slurm = re.search(r"slurm\S* (\d+)\.(\d+)", output("scontrol", "--version") or "")
    try:
        installed = version("pyslurm")
    except PackageNotFoundError:
        return None
    if slurm is None or output(sys.executable, "-c", _PYSLURM) is not None:
        return None
    release = f"{int(slurm[1])}.{int(slurm[2])}"  # as pip spells it: for Slurm 24.05 pyslurm 24.5
    return (
        f"pyslurm {installed} does not work with Slurm {slurm[1]}.{slurm[2]}; scontrol is asked instead",
        f"pip install 'pyslurm=={release}.*', or from its repository where PyPI has none; or pip uninstall pyslurm",
    )


def from_scontrol() -> list[dict[str, Any]] | None:
    """Nodes by ``scontrol``, None where Slurm does not answer.

    As text: what ``--json`` of Slurm's commands prints differs between releases, and Slurm 22.05's scontrol has none.
    """
    text = output("scontrol", "show", "nodes", "--oneliner")
    nodes = []
    for line in (text or "").splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "NodeName" not in fields:
            continue  # "No nodes in the system"
        devices = parse_gres(fields.get("Gres", ""))
        partitions, features = _list(fields.get("Partitions")), _list(fields.get("AvailableFeatures"))
        memory = int(fields["RealMemory"]) * MIB
        nodes.append(_node(fields["NodeName"], int(fields["CPUTot"]), memory, devices, None, partitions, features))
    return nodes or None


def _list(text: str | None) -> list[str]:
    return [part for part in (text or "").split(",") if part not in ("", "(null)")]


def parse_gres(text: str) -> list[dict[str, Any]]:
    """GPUs of Slurm's ``gpu:h200:8(S:0-1),tmp:1G``; the type is optional."""
    devices = []
    for item in text.split(","):
        kind, *rest = item.partition("(")[0].split(":")
        if kind == "gpu" and rest and rest[-1].isdigit():
            devices += _gpus(rest[0] if len(rest) > 1 else "gpu", int(rest[-1]))
    return devices


def from_machine() -> list[dict[str, Any]]:
    """This machine: the cores this process may use, its memory, its NVIDIA GPUs and their links."""
    listing = output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
    devices, driver = [], None
    for line in (listing or "").splitlines():
        name, memory_mib, driver = (field.strip() for field in line.rsplit(",", 2))
        devices.append({"kind": "gpu", "name": name, "memory_bytes": int(memory_mib) * MIB})
    links = output("nvidia-smi", "topo", "-m") if devices else None
    cpus, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total
    return [_node(socket.gethostname(), cpus, memory, devices, links, driver=driver)]


def unheard(facts: dict[str, Any]) -> str | None:
    """What should know this machine and did not answer `discover`: Slurm, or the driver of GPUs that are there."""
    if facts["source"] != "local":
        return None
    if shutil.which("scontrol"):
        return "Slurm"
    if not facts["nodes"][0]["devices"] and any(Path("/dev").glob("nvidia[0-9]*")):
        return "nvidia-smi"
    return None


def cpu_model() -> str:
    for line in (output("lscpu") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model name":
            return value.strip()
    return platform.machine()


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that results depend on; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def discover() -> dict[str, Any]:
    """The contents of ``hardware.json``."""
    ways = {"pyslurm": from_pyslurm, "slurm": from_scontrol, "local": from_machine}
    source, nodes = next((source, nodes) for source, find in ways.items() if (nodes := find()))
    return {
        "source": source,
        "hostname": socket.gethostname(),
        "nodes": nodes,
        "cpu_model": cpu_model(),
        "versions": versions(),
    }


def run(experiment_dir: Path) -> None:
    """Write ``hardware.json`` and print it in a few lines."""
    facts = discover()
    (experiment_dir / "hardware.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    for node in facts["nodes"]:
        gpus = [device["name"] for device in node["devices"]]
        what = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
        print(
            f"{node['name']}: {node['cpus']} cores, {node['memory_bytes'] / 2**30:.0f} GiB, {what}",
            flush=True,
        )
    print(f"(from {facts['source']}; {facts['cpu_model']})", flush=True)
