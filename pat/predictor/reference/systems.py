"""The machines whose SGLang measurements aiconfigurator-core publishes, and the links between their GPUs.

Only the files of the package are read, it is not imported: a configuration is checked in milliseconds.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import yaml

from pat.predictor.regression import Curve
from pat.problems import ConfigError, Problem, shown

PACKAGE, VERSION = "aiconfigurator_core", "0.12.0"
# With --no-deps: of what it asks for, this environment has numpy, pandas, pyarrow, PyYAML and scipy.
INSTALL = f"pip install --no-deps aiconfigurator-core=={VERSION}"
KINDS = ("gemm", "attention", "comm")  # tables without which a dense model has no step


@dataclass(frozen=True)
class System:
    """A machine of the package; the figures are those of its ``systems/NAME.yaml``."""

    name: str
    data: Path  # its folder of measurements
    gpus: int  # of a node
    link_bytes_s: float  # nominal, one direction, of one GPU: NVLink where there is one, else PCIe
    latency_s: float  # of one message between two GPUs
    memory_bytes_s: float  # of one GPU's own memory, as kernels reach it
    nccl: str  # version of the NCCL whose collectives were measured


def systems() -> dict[str, System]:
    """The machines by name that have SGLang tables. Raises ConfigError with the command that installs them."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        allowed = f"engine, or aiconfigurator after: {INSTALL}"
        raise ConfigError(Problem(("profile", "source"), "aiconfigurator, which is not installed", allowed))
    folder = Path(spec.submodule_search_locations[0]) / "systems"
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        about = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(about, dict) or "data_dir" not in about:
            continue  # settings of the package itself
        data, node, gpu = folder / about["data_dir"], about["node"], about["gpu"]
        if all((data / kind / "sglang").is_dir() for kind in KINDS):
            found[path.stem] = System(
                path.stem,
                data,
                node["num_gpus_per_node"],
                float(node["intra_node_bw"]),
                float(node["p2p_latency"]),
                float(gpu["mem_bw"]) * float(gpu["mem_bw_empirical_scaling_factor"]),
                str(about["misc"]["nccl_version"]),
            )
    return found


def system(name: str | None) -> System:
    """The machine ``name``. Raises ConfigError that lists all of them if it is not one."""
    known = systems()
    if name not in known:
        raise ConfigError(Problem(("profile", "system"), shown(name), f"one of {', '.join(known)}"))
    return known[name]


@dataclass(frozen=True)
class Link:
    """Seconds of one all-to-all by the bytes that the busiest GPU sends to (or gets from) the others."""

    seconds: Curve
    source: str

    @property
    def bytes_s(self) -> float:
        """Rate of large messages, bytes a second, one direction, of one GPU."""
        (x0, x1), (y0, y1) = self.seconds.knots[-2:], self.seconds.values[-2:]
        return (x1 - x0) / (y1 - y0)


def link(machine: System, ranks: int, gb_s: float | None = None) -> Link:
    """The links of ``ranks`` GPUs of ``machine``; with ``gb_s`` that bandwidth (1e9 bytes a second each way).

    Otherwise NCCL's all-to-all as it was measured there (``comm/nccl``, int8, on the most GPUs up to ``ranks``),
    or, where it was not, the nominal bandwidth. The package's message size is what a GPU has for all, itself
    included: on H100 512 MiB in 1.48 ms are 317 GB/s to others, where NVLink 4 gives 450 at best.
    """
    measured = None if gb_s else _measured(machine, ranks)
    if measured is not None:
        gpus, seconds = measured
        return Link(seconds, f"NCCL all-to-all measured on {gpus} GPUs of {machine.name} (aiconfigurator-core)")
    rate = gb_s * 1e9 if gb_s else machine.link_bytes_s
    seconds = Curve((0.0, rate), (machine.latency_s, machine.latency_s + 1.0))
    return Link(seconds, "profile.link_gb_s" if gb_s else f"nominal bandwidth of {machine.name} (aiconfigurator-core)")


def _measured(machine: System, ranks: int) -> tuple[int, Curve] | None:
    folder = machine.data / "comm" / "nccl"
    versions = [machine.nccl, *sorted((p.name for p in folder.glob("*")), reverse=True)]
    path = next((p for version in versions if (p := folder / version / "nccl_perf.parquet").is_file()), None)
    if path is None:
        return None
    rows = pl.read_parquet(path).filter(
        (pl.col("op_name") == "alltoall") & (pl.col("nccl_dtype") == "int8") & (pl.col("num_gpus") <= ranks)
    )
    if rows.is_empty():
        return None
    gpus = rows["num_gpus"].max()
    means = rows.filter(num_gpus=gpus).group_by("message_size").agg(pl.col("latency").mean()).sort("message_size")
    sent = means["message_size"].to_numpy() * (gpus - 1) / gpus
    milliseconds = np.maximum.accumulate(means["latency"].to_numpy())  # measured, hence not quite monotone
    return gpus, Curve(tuple(map(float, sent)), tuple(float(ms) / 1e3 for ms in milliseconds))
