"""How long the stages of an experiment took, and on a cluster with which job, where and on how much energy.

A stage that runs in a Slurm job notes which (``jobs/STAGE.json``); ``collect`` asks Slurm about it, once, later.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from pat.cluster import output

# Slurm's names of what is kept. ConsumedEnergyRaw is in joules, 0 or empty where no plugin measures it.
_SACCT = "JobIDRaw,State,ElapsedRaw,NodeList,AllocTRES,ConsumedEnergyRaw"


def note(experiment: Path, stage: str) -> None:
    """Write which Slurm job ``stage`` runs in; nothing outside of one."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    folder = experiment / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stage}.json").write_text(
        json.dumps({"slurm_job_id": int(job), "node": node_name()}) + "\n", encoding="utf-8"
    )


def node_name() -> str:
    """This node, as Slurm names it; SLURMD_NODENAME is one of the variables that Snakemake's jobstep may drop."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def collect(experiment: Path) -> list[dict[str, Any]]:
    """Write and return ``jobs.json``: a row a stage that has run, in the order in which they ended.

    Keys: stage; slurm_job_id, node, state, gpus (null without Slurm); elapsed_s, of the job where Slurm tells, else of
    the command; energy_j (null unless accounting measures it); source: sacct, scontrol or benchmark, which told
    elapsed_s. What an earlier call learnt is kept: Slurm without accounting forgets a job within minutes.
    """
    known = {(row["stage"], row["slurm_job_id"]): row for row in _read(experiment / "jobs.json")}
    rows = []
    files = (experiment / "benchmarks").glob("*.tsv")
    for file in sorted(files, key=lambda file: file.stat().st_mtime):
        stage = file.stem
        if stage.startswith(("config-", "track-")):
            continue
        row = {"stage": stage, "slurm_job_id": None, "node": None, "state": None, "elapsed_s": seconds(file)}
        row |= {"gpus": None, "energy_j": None, "source": "benchmark"}
        note_ = experiment / "jobs" / f"{stage}.json"
        if note_.exists():
            row |= json.loads(note_.read_text(encoding="utf-8"))
            before = known.get((stage, row["slurm_job_id"]))
            if before and before["source"] != "benchmark" and before["state"] not in ("RUNNING", "COMPLETING"):
                row = before
            else:
                row |= from_sacct(row["slurm_job_id"]) or from_scontrol(row["slurm_job_id"]) or {}
        rows.append(row)
    (experiment / "jobs.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return rows


def from_sacct(job: int) -> dict[str, Any] | None:
    """What accounting says of a job; None where there is no accounting or it does not know the job."""
    text = output("sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job}", f"--format={_SACCT}")
    for line in (text or "").splitlines():
        number, state, elapsed, node, tres, energy = line.split("|")
        if number == str(job):
            joules = int(energy) if energy.isdigit() and int(energy) else None
            return {
                "state": state.split()[0],
                "elapsed_s": float(elapsed),
                "node": node,
                "gpus": gpus(tres),
                "energy_j": joules,
                "source": "sacct",
            }
    return None


def from_scontrol(job: int) -> dict[str, Any] | None:
    """What slurmctld says of a job that it still remembers (MinJobAge, mostly 300 s after its end); else None."""
    text = output("scontrol", "show", "job", "--oneliner", str(job)) or ""
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    if "RunTime" not in fields:
        return None
    return {
        "state": fields["JobState"],
        "elapsed_s": duration(fields["RunTime"]),
        "node": fields.get("NodeList") or None,
        "gpus": gpus(fields.get("AllocTRES", "")) or asked_gpus(fields),
        "energy_j": None,
        "source": "scontrol",
    }


def gpus(tres: str) -> int:
    """GPUs in Slurm's ``cpu=2,mem=32G,gres/gpu=2,gres/gpu:h200=2``; the count by type repeats the first."""
    found = re.search(r"gres/gpu=(\d+)", tres) or re.search(r"gres/gpu:\w+=(\d+)", tres)
    return int(found[1]) if found else 0


def asked_gpus(fields: dict[str, str]) -> int:
    """GPUs of ``TresPerJob=gres:gpu:h200:2`` and the like; where there is no accounting, TRES may leave GPUs out."""
    for key, times in (("TresPerJob", 1), ("TresPerNode", int(fields.get("NumNodes", 1)))):
        if found := re.search(r"gpu(?::[A-Za-z_]\w*)?[:=](\d+)", fields.get(key, "")):
            return times * int(found[1])
    return 0


def duration(text: str) -> float:
    """Seconds of Slurm's ``[days-]hours:minutes:seconds``."""
    days, _, clock = text.rpartition("-")
    total = 0
    for part in clock.split(":"):
        total = 60 * total + int(part)
    return float(86400 * int(days or 0) + total)


def seconds(benchmark: Path) -> float | None:
    """Wall time of a Snakemake benchmark; None if it holds no number."""
    with benchmark.open(encoding="utf-8") as lines:
        row = next(csv.DictReader(lines, delimiter="\t"), {})
    try:
        return float(row["s"])
    except (KeyError, ValueError):
        return None


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
