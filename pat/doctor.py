"""``pat doctor``: can this machine run PAT, and if not, what to do about it?"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import psutil
from rich.console import Console

from pat import cluster, configfile
from pat.problems import ConfigError

GIB = 1 << 30
PINS = Path(__file__).parents[1] / "envs" / "cpu.txt"
COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}
PLUGINS = (("sglang.srt.plugins", "pat"), ("verl.plugins", "pat"))


@dataclass(frozen=True)
class Finding:
    """``level`` is "ok", "warning" (runs, but not well) or "problem" (cannot run); ``cure`` is what helps."""

    level: str
    what: str
    cure: str = ""


def _python() -> Finding:
    found = platform.python_version()
    if found.startswith("3.11."):
        return Finding("ok", f"Python {found}")
    return Finding(
        "problem", f"Python {found}", "PAT needs 3.11: install python3.11 and python3.11-venv, then make env"
    )


def _packages(pins: str) -> Finding:
    """Are the versions of ``pins`` (lines NAME==VERSION) the installed ones?"""
    wanted = re.findall(r"^([\w.-]+)==(\S+)", pins, re.M)
    wrong = []
    for name, pin in wanted:
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "missing"
        if found.partition("+")[0] != pin:  # torch's CPU build is 2.13.0+cpu
            wrong.append(f"{name} {found} (wants {pin})")
    if not wrong:
        return Finding("ok", f"{len(wanted)} packages at their pinned versions")
    listed = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    return Finding("problem", f"packages: {listed}", "make env")


def _plugins() -> Iterator[Finding]:
    for group, name in PLUGINS:
        found = [entry for entry in entry_points(group=group) if entry.name == name]
        if len(found) != 1:
            what = f"plugin {name} in {group}: found {len(found)} times"
            yield Finding("problem", what, "pip install --no-deps --no-build-isolation -e .")
            continue
        try:
            found[0].load()
        except Exception as error:  # whatever its import raises would be swallowed by SGLang and verl
            what = f"plugin {name} in {group} does not load: {type(error).__name__}: {error}"
            yield Finding("problem", what, "make env; if it stays, the installed version is not the one PAT supports")
        else:
            yield Finding("ok", f"plugin {found[0].value}")


def _space() -> Iterator[Finding]:
    needs = (
        ("memory", psutil.virtual_memory().available, 8, "close other programs"),
        ("/dev/shm", shutil.disk_usage("/dev/shm").free, 2, "in a container: docker run --shm-size=8g"),
        ("disk here", shutil.disk_usage(".").free, 5, "free some, or clone to a larger disk"),
    )
    for name, free, wanted, cure in needs:
        level = "ok" if free >= wanted * GIB else "warning"
        cure = "" if level == "ok" else f"{wanted} GiB are better: {cure}"
        yield Finding(level, f"{name}: {free / GIB:.1f} GiB free", cure)


def _machine() -> Iterator[Finding]:
    facts = cluster.discover()
    gpus = sum(len(node["devices"]) for node in facts["nodes"])
    if facts["source"] == "local":
        yield Finding("ok", f"{len(os.sched_getaffinity(0))} cores, {gpus or 'no'} GPUs, no Slurm")
    else:
        yield Finding("ok", f"Slurm: {len(facts['nodes'])} nodes, {gpus or 'no'} GPUs (asked by {facts['source']})")


def _config(path: Path) -> Iterator[Finding]:
    try:
        configs = configfile.load(path)
    except ConfigError as error:
        yield Finding("problem", str(error), f"edit {path}")
        return
    yield Finding("ok", f"{path}: {', '.join(configs)}")
    for warning in dict.fromkeys(w for config in configs.values() for w in configfile.warnings(config)):
        yield Finding("warning", warning, f"fewer ranks in {path}, or a larger machine")


def examine(config: Path) -> Iterator[Finding]:
    """Everything that is looked at, in order."""
    yield _python()
    if PINS.exists():
        yield _packages(PINS.read_text())
    yield from _plugins()
    yield from _machine()
    yield from _space()
    yield from _config(config)


def run(config: Path) -> bool:
    """Print the findings; True if PAT can run here."""
    console = Console(highlight=False, soft_wrap=True)
    able = True
    for finding in examine(config):
        able &= finding.level != "problem"
        console.print(f"[{COLOURS[finding.level]}]{finding.level:>8}[/]  ", end="")
        console.print(finding.what, markup=False)
        if finding.cure:
            console.print(f"          -> {finding.cure}", markup=False)
    console.print("PAT can run here." if able else "PAT cannot run here yet.")
    return able
