# The configuration, checked before anything else happens, and what the rules have in common.
import base64
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.settings.types import DeploymentMethod

from pat import basis as pat_basis
from pat import cluster as pat_cluster
from pat import clusterfile as pat_clusterfile
from pat import configfile as pat_configfile
from pat import logged
from pat import machine as pat_machine
from pat import yamlfile as pat_yamlfile
from pat.config import stage_config
from pat.digest import Digests
from pat.problems import ConfigError
from pat.rl import processes

# The rules call `pat`: where the environment was not activated, it stands beside the Python that runs this.
if shutil.which("pat") is None:
    os.environ.update(PATH=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")

# `pat logged` ends what it runs when this process is gone: in a job of Slurm that is the job's own Snakemake.
os.environ[logged.OWNER] = str(os.getpid())

try:
    for path in workflow.overwrite_configfiles or ["config/config.yaml"]:
        pat_yamlfile.read(path)  # Snakemake's own reader takes a key twice without a word
    EXPERIMENTS = pat_configfile.parse(config)
    CLUSTER = pat_clusterfile.load()
except ConfigError as error:
    raise WorkflowError(str(error))

if workflow.local_exec and workflow.is_main_process:
    for warning in {text for each in EXPERIMENTS.values() for text in pat_configfile.warnings(each)}:
        logger.warning(f"warning: {warning}")

# What the jobs run in: chosen in config/cluster.yaml and nowhere else. `pat` checks on each node that it is there.
CONDA = f"../../envs/conda-{CLUSTER.requirements}.yaml"
for method, wanted in (
    (DeploymentMethod.ENV_MODULES, CLUSTER.modules),
    (DeploymentMethod.APPTAINER, CLUSTER.container),
    (DeploymentMethod.CONDA, CLUSTER.conda),
):
    if wanted:
        workflow.deployment_settings.imply_deployment_method(method)
# The processes that Snakemake starts on nodes are told by arguments, and read this file as well.
if CLUSTER.container and workflow.is_main_process:
    workflow.deployment_settings.apptainer_args += f" {CLUSTER.container_args}"


onerror:
    free = shutil.disk_usage("results" if Path("results").exists() else ".").free
    if free < 1 << 30:
        logger.error(
            f"Only {free >> 20} MiB are free in results/. A log that is empty or breaks off means that the disk was full: "
            "make room, then run the same command again."
        )


DIGESTS = Digests(Path(".snakemake/pat-digests.json"))
ARMS = sorted({arm for each in EXPERIMENTS.values() for arm in each.arms})


wildcard_constraints:
    experiment="|".join(map(re.escape, EXPERIMENTS)),
    arm="|".join(map(re.escape, ARMS)) or "(?!)",


def stages(experiment):
    """Stages of ``experiment``, in the order in which they run."""
    arms = [f"train-{arm}" for arm in EXPERIMENTS[experiment].arms]
    first = ["hardware", "assets"] if here(experiment) else []
    return [*first, "profile", "predictor", *arms, "simulate", "report"]


def settings(experiment, stage):
    """What ``stage`` reads of the configuration, as its file of settings holds it."""
    return stage_config(EXPERIMENTS[experiment], stage).model_dump_json(indent=2)


def basis(experiment, stage):
    """What ``stage`` rests on besides, as its file of that holds it: code, packages, the user's files, the machine."""
    now = pat_basis.of(stage, EXPERIMENTS[experiment], DIGESTS, environment, machine())
    before = last_basis(experiment, stage)
    if "machine" in now:
        now["machine"] = pat_machine.standing(
            before.get("machine", {}), now["machine"], pat_cluster.unheard(discovered())
        )
    return json.dumps(now, indent=2)


def kept(text):
    """``text`` in a file whose name is its digest: as a parameter it would fill pages when Snakemake says what changed."""
    file = Path(".snakemake/pat-basis", hashlib.sha256(text.encode()).hexdigest()[:16])
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")
    return str(file)


def last_basis(experiment, stage):
    try:
        return json.loads(Path(f"results/{experiment}/basis/{stage}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


@cache
def discovered():
    return pat_cluster.discover()


@cache
def machine():
    """The machine, or the cluster's nodes, as they are now; nobody is asked where everything is looked up."""
    if not any(map(here, EXPERIMENTS)):
        return {"timed": {}, "nodes": {}}
    return pat_machine.of(discovered(), CLUSTER.partition, CLUSTER.gpu_type)


def environment(names):
    """Versions of packages in what the jobs run in; of an image, all that is known from outside is its contents."""
    if CLUSTER.container:
        image = Path(CLUSTER.container)
        return {"container": DIGESTS.of([image])[str(image)] if image.is_file() else CLUSTER.container}
    if CLUSTER.conda:
        return pat_basis.pinned(names, CLUSTER.requirements)
    return pat_basis.installed(names)


def renew(experiment):
    """Rewrite files of settings and bases that are not today's and of whose making Snakemake has no record.

    With its records it sees by itself that they changed. Where .snakemake/ was removed, or results were copied without
    it, nothing would run again, and the report would tell of others than were asked for.
    """
    for stage in [*stages(experiment), "tracking"]:
        for folder, told in (("config", settings), ("basis", basis)):
            file = f"results/{experiment}/{folder}/{stage}.json"
            record = Path(".snakemake/metadata", base64.b64encode(file.encode(), b"-_").decode())
            if not record.exists() and Path(file).exists():
                if Path(file).read_text(encoding="utf-8") != (wanted := told(experiment, stage) + "\n"):
                    Path(file).write_text(wanted, encoding="utf-8")


def tell_changes():
    """Say what has changed beneath results that are there: Snakemake itself only says that something has."""
    changes = {}
    for name in EXPERIMENTS:
        for stage in [*stages(name), "tracking"]:
            if before := last_basis(name, stage):
                for change in pat_basis.differences(before, json.loads(basis(name, stage))):
                    changes.setdefault(change, []).append(f"{stage} of {name}")
    for change, where in changes.items():
        logger.info(f"Since it ran last, {change} ({', '.join(where)})")


def here(experiment):
    """Whether anything of it runs on this machine, rather than being looked up and simulated."""
    each = EXPERIMENTS[experiment]
    return bool(each.arms) or each.profile.source == "engine"


def prepared(wildcards):
    if not here(wildcards.experiment):
        return []
    return expand([*rules.hardware.output, *OUTCOME["assets"]], experiment=wildcards.experiment)


def ranks(wildcards):
    return EXPERIMENTS[wildcards.experiment].ranks


def train_nodes(wildcards):
    return EXPERIMENTS[wildcards.experiment].train.nodes


def slurm(ranks=lambda wildcards: 0, nodes=lambda wildcards: 1):
    """What a job asks Slurm for: a GPU a rank, and what config/cluster.yaml says. On one machine nobody reads it."""

    def asked(name):
        return lambda wildcards: pat_clusterfile.request(CLUSTER, ranks(wildcards), nodes(wildcards))[name]

    return {name: asked(name) for name in pat_clusterfile.request(CLUSTER, 0)}


def measured(wildcards):
    """Whether the profile is made on this machine, or taken from published measurements of another."""
    return EXPERIMENTS[wildcards.experiment].profile.source == "engine"


def profile_model(wildcards):
    return f"results/{wildcards.experiment}/model" if measured(wildcards) else []


def profile_ranks(wildcards):
    """Ranks that the profile runs on; 0 where it is looked up."""
    return ranks(wildcards) if measured(wildcards) else 0


def trained(wildcards):
    arms = EXPERIMENTS[wildcards.experiment].arms
    return expand(rules.train.output, experiment=wildcards.experiment, arm=arms)


def outcome(wildcards):
    """Files that ``wildcards.stage`` leaves behind."""
    stage, _, arm = wildcards.stage.partition("-")
    patterns = rules.train.output if stage == "train" else OUTCOME[stage]
    return expand(patterns, experiment=wildcards.experiment, arm=arm)


if workflow.is_main_process:
    try:
        tell_changes()
        for name in EXPERIMENTS:
            renew(name)
    except OSError as error:
        raise WorkflowError(
            f"{error.filename}: cannot be read ({error.strerror}), so nobody knows whether it changed"
        )
