"""The nodes of the Slurm job that this process runs in, and how to start something on them (Slurm 22.05)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from pat.problems import ConfigError, Problem

ASK_S = 60.0  # longest that Slurm's controller may take to answer, seconds


def nodes(wanted: int) -> list[str]:
    """Names of ``wanted`` nodes of the job, the one of this process first.

    Raises ConfigError if this process is not in a Slurm job of so many nodes.
    """
    job, own = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURMD_NODENAME")
    if not job or not own:
        how = "1, unless it runs on a node of a Slurm job: start it with `snakemake --profile slurm`, or by "
        raise _problem(wanted, f"{how}`srun -N1 -n1` or `sbatch` in a job of {wanted} nodes")
    found = _of_job(job)
    if len(found) < wanted:
        raise _problem(wanted, f"at most the nodes of Slurm job {job}, which has {len(found)}: {', '.join(found)}")
    return [own, *(name for name in found if name != own)][:wanted]


def srun(names: Sequence[str], command: Sequence[str]) -> list[str]:
    """``command`` once on each of the nodes ``names`` of this job, whose other steps it leaves their resources."""
    return [
        "srun",
        f"--jobid={os.environ['SLURM_JOB_ID']}",
        "--overlap",
        f"--nodelist={','.join(names)}",
        f"--nodes={len(names)}",
        f"--ntasks={len(names)}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        *command,
    ]


def outside_of_step(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` without what the present step of the job says of its own size, which srun would obey."""
    kept = ("SLURM_CONF", "SLURM_CLUSTER_NAME")
    return {
        name: value for name, value in variables.items() if name in kept or not name.startswith(("SLURM_", "SRUN_"))
    }


def _of_job(job: str) -> list[str]:
    """All nodes of the job. The variables of a step speak of the step."""
    for line in _ask("squeue", "--noheader", f"--jobs={job}", "--format=%A %N").splitlines():
        number, _, listed = line.strip().partition(" ")
        if number == job:
            return _ask("scontrol", "show", "hostnames", listed.strip()).split()
    return []


def _ask(*command: str) -> str:
    """What a command of Slurm prints. Raises RuntimeError with its own words if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_S, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"Slurm does not answer `{' '.join(command)}`: {error}") from None
    if done.returncode:
        raise RuntimeError(f"Slurm does not answer `{' '.join(command)}`: {done.stderr.strip()}")
    return done.stdout


def _problem(wanted: int, allowed: str) -> ConfigError:
    return ConfigError(Problem(("train", "nodes"), str(wanted), allowed))
