"""What a machine did during a stage: CPU, memory and GPUs, a sample every few seconds, in a Parquet file.

A thread of the process that waits for the work takes the samples, of its own node only. Nothing is sent anywhere
meanwhile: the file is logged with the stage's other files, by the one process that writes to the tracker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import psutil

PERIOD_S = 5.0
GAP_S = 60.0  # samples further apart are of two starts
GPU = pl.Struct({"gpu": pl.Int64, "use_pct": pl.Float64, "memory_mb": pl.Float64, "power_w": pl.Float64})
SCHEMA = {
    "time_s": pl.Float64,  # since 1970
    "cpu_pct": pl.Float64,  # of all cores, since the sample before
    "memory_mb": pl.Float64,  # used, 1e6 bytes
    "memory_pct": pl.Float64,
    "gpus": pl.List(GPU),  # those that NVML shows; a number is null where it does not tell
}


@contextmanager
def sampled(path: Path, period_s: float = PERIOD_S) -> Iterator[None]:
    """Samples this node while the block runs and then writes `path`, whether it succeeds or not.

    What `path` holds already is kept: a training that goes on from a checkpoint adds to it.
    """
    samples, ended = [], threading.Event()
    gpus = Gpus()

    def sample() -> None:
        psutil.cpu_percent()  # a thread's first call has nothing to compare with
        while not ended.wait(period_s):
            samples.append(_sample(gpus))
        samples.append(_sample(gpus))  # also of what was over before the first was due

    thread = threading.Thread(target=sample, name="usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.parent.mkdir(parents=True, exist_ok=True)
        frame = pl.DataFrame(samples, schema=SCHEMA)
        (pl.concat([pl.read_parquet(path), frame]) if path.exists() else frame).write_parquet(path)


def _sample(gpus: Gpus) -> dict:
    memory = psutil.virtual_memory()
    return {
        "time_s": time.time(),
        "cpu_pct": psutil.cpu_percent(),
        "memory_mb": memory.used / 1e6,
        "memory_pct": memory.percent,
        "gpus": gpus.read(),
    }


class Gpus:
    """NVIDIA's GPUs of this node; none where there is no NVML (nvidia-ml-py comes with torch for CUDA)."""

    def __init__(self) -> None:
        self._handles = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception:  # not installed, no driver, no permission: the samples lack GPUs, training goes on
            return
        self._reads = {
            "use_pct": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_mb": lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 1e6,
            "power_w": lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        }
        self._error = pynvml.NVMLError

    def read(self) -> list[dict]:
        return [
            {"gpu": index} | {name: self._try(read, handle) for name, read in self._reads.items()}
            for index, handle in enumerate(self._handles)
        ]

    def _try(self, read, handle) -> float | None:
        try:
            return float(read(handle))
        except self._error:
            return None


def measurements(samples: pl.DataFrame, most: int = 400) -> Iterator[tuple[str, float | None, int, float]]:
    """(name, value, step, seconds since 1970) of at most `most` samples, evenly chosen.

    The names are those of MLflow's own monitor (mlflow.system_metrics), for which its pages have a tab.
    """
    for step, row in enumerate(samples.gather_every(-(-len(samples) // most)).iter_rows(named=True)):
        at = row["time_s"]
        yield "system/cpu_utilization_percentage", row["cpu_pct"], step, at
        yield "system/system_memory_usage_megabytes", row["memory_mb"], step, at
        yield "system/system_memory_usage_percentage", row["memory_pct"], step, at
        for gpu in row["gpus"]:
            name = f"system/gpu_{gpu['gpu']}"
            yield f"{name}_utilization_percentage", gpu["use_pct"], step, at
            yield f"{name}_memory_usage_megabytes", gpu["memory_mb"], step, at
            yield f"{name}_power_usage_watts", gpu["power_w"], step, at


def energy_wh(samples: pl.DataFrame) -> float | None:
    """Energy of all GPUs over the samples, in watt hours: power times the time since the sample before.

    None without GPUs that tell their power. Between two starts of a stage nothing is counted.
    """
    power = samples.select("time_s", total=pl.col("gpus").list.eval(pl.element().struct.field("power_w")).list.sum())
    spans = power.with_columns(seconds=pl.col("time_s").diff()).filter(pl.col("total") > 0)
    known = spans.filter(pl.col("seconds").is_between(0, GAP_S))
    return float((known["total"] * known["seconds"]).sum()) / 3600 if len(known) else None
