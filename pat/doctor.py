"""``pat doctor``: can this machine run PAT, and if not, what to do about it?"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import psutil
from rich.console import Console

from pat import cluster, clusterfile, configfile
from pat.jobs import node_name
from pat.problems import ConfigError

GIB = 1 << 30
ENVS = Path(__file__).parents[1] / "envs"
INSTALL = {"cpu": "make env", "cuda": "uv pip install --no-deps -r envs/cuda.txt"}
NODE_PACKAGES = ("torch", "sglang", "verl", "transformers", "ray")  # what a stage's results depend on most
HEAVY = ("assets", "profile", "predictor", "train", "simulate")  # stages that run as jobs
_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.M)
_TORCH = "import torch; print(torch.version.cuda, torch.cuda.device_count())"
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


def _wrong(pins: str, names: Iterable[str] | None = None) -> list[str]:
    """Packages of ``pins`` (lines NAME==VERSION), or those of them in ``names``, that are not installed so."""
    wrong = []
    for name, pin in _PIN.findall(pins):
        if names is not None and name not in names:
            continue
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "missing"
        if found.partition("+")[0] != pin.partition("+")[0]:  # torch's CPU build is 2.13.0+cpu
            wrong.append(f"{name} {found} (wants {pin})")
    return wrong


def _packages(pins: str, cure: str = INSTALL["cpu"]) -> Finding:
    """Are the versions of ``pins`` the installed ones?"""
    wrong = _wrong(pins)
    if not wrong:
        return Finding("ok", f"{len(_PIN.findall(pins))} packages at their pinned versions")
    listed = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    return Finding("problem", f"packages: {listed}", cure)


def _requirements(slurm: bool) -> str:
    """The set of packages that must be here: the one that jobs are promised, where they run in this environment too."""
    if slurm:
        try:
            asked = clusterfile.load()
        except ConfigError:
            return "cpu"  # told by _machine
        if not (asked.container or asked.conda):
            return asked.requirements
    try:
        on_cpu = version("torch").endswith("+cpu")  # as `make env` has it where it can; then GPUs are not used
    except PackageNotFoundError:
        on_cpu = False  # what is missing is told by _packages
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) and not on_cpu else "cpu"


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


def _machine(facts: dict, ranks: int) -> Iterator[Finding]:
    """What there is to run on; with Slurm also whether config/cluster.yaml fits it. ranks: GPUs wanted of one node."""
    nodes = facts["nodes"]
    gpus = sum(len(node["devices"]) for node in nodes)
    if facts["source"] == "local":
        yield Finding("ok", f"{len(os.sched_getaffinity(0))} cores, {gpus or 'no'} GPUs, no Slurm")
        return
    yield Finding("ok", f"Slurm: {len(nodes)} nodes, {gpus or 'no'} GPUs (asked by {facts['source']})")
    if mismatch := cluster.pyslurm_mismatch():
        yield Finding("warning", *mismatch)
    try:
        asked = clusterfile.load()
    except ConfigError as error:
        yield Finding("problem", str(error), f"edit {clusterfile.path()}")
        return
    yield from _asked(asked, nodes, ranks)


def _asked(asked: clusterfile.Cluster, nodes: list[dict], ranks: int) -> Iterator[Finding]:
    """Does the cluster have what config/cluster.yaml asks it for? Slurm would queue some of it for ever."""
    file, cure = clusterfile.path(), f"edit {clusterfile.path()}"
    known = sorted({partition for node in nodes for partition in node["partitions"]})
    wanted = [name for name in (asked.partition, asked.cpu_partition) if name]
    unknown = [part for name in wanted for part in name.split(",") if part not in known]
    if unknown:
        yield Finding("problem", f"{file}: no partition {', '.join(unknown)}; there are {', '.join(known)}", cure)
        return
    if asked.gpus == "none":
        yield Finding("ok", f"{file}: jobs ask for no GPU")
        return
    inside = [n for n in nodes if not asked.partition or set(asked.partition.split(",")) & set(n["partitions"])]
    most = max((sum(_is(device, asked.gpu_type) for device in node["devices"]) for node in inside), default=0)
    kind = f"GPUs of type {asked.gpu_type}" if asked.gpu_type else "GPUs"
    where = f"in partition {asked.partition}" if asked.partition else "on this cluster"
    if most < ranks:
        types = sorted({device["name"] for node in inside for device in node["devices"]})
        what = f"{file}: {ranks} {kind} of one node are asked for; {where} a node has {most} (types: {types or 'none'})"
        yield Finding("problem", what, f"{cure}, or fewer ranks")
    else:
        yield Finding("ok", f"{file}: {ranks} {kind} a node {where}")


def _is(device: dict, gpu_type: str | None) -> bool:
    return gpu_type is None or device["name"] == gpu_type


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
    facts = cluster.discover()
    requirements = _requirements(facts["source"] != "local")
    if (pins := ENVS / f"{requirements}.txt").exists():
        yield _packages(pins.read_text(encoding="utf-8"), INSTALL[requirements])
    yield from _plugins()
    yield from _machine(facts, _ranks(config))
    yield from _space()
    yield from _config(config)


def _ranks(config: Path) -> int:
    try:
        return max(each.ranks for each in configfile.load(config).values())
    except ConfigError:
        return 1  # told by _config


def check_node(stage: str, cfg) -> None:
    """Before anything heavy in a Slurm job: has this node what config/cluster.yaml promises?

    cfg: what the stage reads of the configuration. Exits with the node, what is wrong and what helps.
    """
    kind = stage.partition("-")[0]
    if kind not in HEAVY:
        return
    promised = clusterfile.load()
    pins = ENVS / f"{promised.requirements}.txt"
    wrong = [] if _python().level == "ok" else [_python().what]
    if pins.exists():
        wrong += _wrong(pins.read_text(encoding="utf-8"), NODE_PACKAGES)
    cure = f"install what it should run in ({INSTALL[promised.requirements]}, or modules, container, conda in FILE)"
    engine = kind == "train" or (kind == "profile" and cfg.profile.source == "engine")
    if not wrong and engine and promised.requirements == "cuda" and promised.gpus != "none":
        answer = (cluster.output(sys.executable, "-c", _TORCH, timeout_s=300) or "torch fails").split()
        seen = int(answer[-1]) if answer[-1].isdigit() else 0
        if seen < cfg.ranks:
            wrong = [f"torch (CUDA {answer[0]}) sees {seen} GPUs; {cfg.ranks} are needed"]
            cure = "see nvidia-smi there for GPUs and driver, and gpus in FILE for how they are asked for"
    if wrong:
        job = f"Slurm job {os.environ.get('SLURM_JOB_ID')}, envs/{promised.requirements}.txt"
        sys.exit(
            f"error: node {node_name()} cannot run stage {stage} ({job}): {'; '.join(wrong)}\n"
            f"  -> {cure.replace('FILE', str(clusterfile.path()))}"
        )


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
