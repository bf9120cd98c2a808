"""Facts about the cluster (config/cluster.yaml): what they may say, and what Slurm is asked for because of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from pat import yamlfile
from pat.config import Bool, Positive, Section, Text
from pat.problems import ConfigError, Problem, shown, translate

VARIABLE = "PAT_CLUSTER"
DEFAULT = Path("config/cluster.yaml")
Requirements = Literal["cpu", "cuda"]


class Cluster(Section):
    """One cluster; every key has a default that suits many."""

    partition: Text | None = None
    """Partition of jobs that ask for GPUs; null: the cluster's default."""
    cpu_partition: Text | None = None
    """Partition of jobs that ask for none; null: the same."""
    account: Text | None = None
    """Account that is charged; null: none is named. Slurm's plugin looks it up, so there must be accounting."""
    qos: Text | None = None
    """Quality of service."""
    constraint: Text | None = None
    """Features that nodes of GPU jobs must have, as sbatch --constraint takes them: h100&nvlink."""
    gpus: Literal["gpus", "gres", "none"] = "gpus"
    """How GPUs are asked for: --gpus=h100:8, --gres=gpu:h100:8, or not at all (a cluster of CPUs)."""
    gpu_type: Text | None = None
    """Their type, the h100 in there; null: any."""
    exclusive: Bool = True
    """Whether profile and training have their nodes to themselves. They are timed, so others there would show."""
    memory_gb_per_rank: Positive = 16
    """Memory of a node that profile and training ask for, for each rank on it; gigabytes."""
    memory_gb: Positive = 16
    """Memory of a job that needs no GPU. assets loads a checkpoint of one's own whole, in model.dtype; gigabytes."""
    cpus_per_rank: Positive = 1
    """CPUs of a node that profile and training ask for, for each rank on it; with GPUs rather each one's share."""
    requirements: Requirements = "cuda"
    """Which packages the jobs must find: those of envs/cuda.txt or of envs/cpu.txt."""
    modules: tuple[Text, ...] = ()
    """Environment modules that each job loads first, in this order."""
    container: Text | None = None
    """Apptainer image that the jobs run in."""
    container_args: Annotated[str, Field()] = "--nv"
    """Further arguments of apptainer exec; --nv gives it the node's GPUs."""
    conda: Bool = False
    """Let Snakemake make a conda environment of envs/conda-cpu.yaml or envs/conda-cuda.yaml and run the jobs in it."""


def path() -> Path:
    """The file that counts: the one PAT_CLUSTER names, else config/cluster.yaml."""
    return Path(os.environ.get(VARIABLE) or DEFAULT)


def load(file: Path | None = None) -> Cluster:
    """The cluster that ``file`` describes. Raises ConfigError that names the file and all that is wrong in it."""
    file = file or path()
    try:
        raw = yamlfile.read(file, "the whole file")
        cluster = Cluster.model_validate({} if raw is None else raw)
        problems = list(_checks(cluster))
    except ValidationError as error:
        problems = translate(Cluster, error)
    except ConfigError as error:
        problems = list(error.problems)
    if problems:
        places = (f"{file}: {'.'.join(map(str, problem.place)) or 'the whole file'}" for problem in problems)
        raise ConfigError(*(replace(problem, place=(place,)) for problem, place in zip(problems, places, strict=True)))
    return cluster


def _checks(cluster: Cluster) -> Iterator[Problem]:
    chosen = {"modules": cluster.modules, "container": cluster.container, "conda": cluster.conda}
    if sum(map(bool, chosen.values())) > 1:
        both = " and ".join(name for name, value in chosen.items() if value)
        yield Problem((both,), "both", "one of modules, container and conda")
    if cluster.gpu_type and cluster.gpus == "none":
        yield Problem(("gpu_type",), shown(cluster.gpu_type), "nothing, since gpus is none")
    if cluster.container and "://" not in cluster.container and not Path(cluster.container).is_absolute():
        allowed = "an absolute path, which is the same on every node, or a URL (docker://...)"
        yield Problem(("container",), shown(cluster.container), allowed)


def request(cluster: Cluster, ranks: int, nodes: int = 1) -> dict[str, Any]:
    """Snakemake's resources of a job with ``ranks`` GPUs on each of ``nodes`` nodes; 0 ranks: one that needs no GPU.

    The names are those of snakemake-executor-plugin-slurm 2.8; None leaves a resource out. Raises ConfigError for
    several nodes in a container, from which no job of Slurm can be asked to start the others.
    """
    if cluster.container and nodes > 1:
        allowed = f"null with train.nodes = {nodes}: training starts Ray on its nodes by srun, which an image has not"
        raise ConfigError(Problem((f"{path()}: container",), shown(cluster.container), allowed))
    timed = ranks > 0
    options = ["--exclusive"] if timed and cluster.exclusive else []
    asked: dict[str, Any] = {
        "slurm_account": cluster.account,
        "qos": cluster.qos,
        "slurm_partition": cluster.partition if timed else cluster.cpu_partition or cluster.partition,
        "constraint": cluster.constraint if timed else None,
        "nodes": nodes if nodes > 1 else None,
        "tasks": None,
        "mem_mb": 1000 * (cluster.memory_gb_per_rank * ranks if timed else cluster.memory_gb),  # of one node
        "cpus_per_task": cluster.cpus_per_rank * ranks if timed else None,
        "gpu": None,
        "gpu_model": None,
        "gres": None,
    }
    count = ":".join(filter(None, (cluster.gpu_type, str(ranks))))
    if timed and cluster.gpus == "gres":
        asked["gres"] = f"gpu:{count}"
    elif timed and cluster.gpus == "gpus" and nodes == 1:
        asked |= {"gpu": ranks, "gpu_model": cluster.gpu_type}
    elif nodes > 1:
        # --gpus counts over all nodes, and Slurm may share it out unevenly. To the plugin this is then a job without
        # GPUs; of one with them it would take the tasks as tasks for each GPU.
        asked["tasks"] = nodes
        options += [f"--gpus-per-node={count}"] if cluster.gpus == "gpus" else []
    return asked | {"slurm_extra": " ".join(options) or None}
