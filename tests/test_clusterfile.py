"""Facts about a cluster: what they may say, and what the Slurm plugin makes of them."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from snakemake_executor_plugin_slurm.submit_string import get_submit_command
from snakemake_executor_plugin_slurm.utils import set_gres_string
from snakemake_executor_plugin_slurm.validation import validate_slurm_extra

from pat import clusterfile
from pat.clusterfile import Cluster
from pat.problems import ConfigError
from tests.workflow.project import ROOT, copy_project

DOCS = (ROOT / "docs" / "clusters.md").read_text()
EXAMPLES = dict(re.findall(r"^### (.+)\n(?:.*\n)*?```yaml\n((?:.*\n)*?)```", DOCS, re.MULTILINE))


class Resources(dict):
    """As a Snakemake job has them."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def sbatch(cluster: Cluster, ranks: int, nodes: int = 1) -> str:
    """The call of sbatch that the plugin makes, but for account and partition, which it asks Slurm about."""
    asked = {key: value for key, value in clusterfile.request(cluster, ranks, nodes).items() if value is not None}
    job = SimpleNamespace(resources=Resources(asked), threads=max(1, ranks), is_group=lambda: False)
    validate_slurm_extra(job)
    params = dict.fromkeys(("run_uuid", "slurm_logfile", "comment_str", "account", "partition", "workdir"), "")
    return get_submit_command(job, params) + set_gres_string(job)


def load(tmp_path, text: str) -> Cluster:
    (tmp_path / "cluster.yaml").write_text(text)
    return clusterfile.load(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(
    ("facts", "nodes", "wanted"),
    [
        ("{}", 1, "--gpus=8"),
        ("gpu_type: h100", 1, "--gpus=h100:8"),
        ("gpus: gres", 1, "--gres=gpu:8"),
        ("{gpus: gres, gpu_type: h100}", 1, "--gres=gpu:h100:8"),
        ("gpu_type: h100", 2, "--nodes=2"),
        ("gpu_type: h100", 2, "--gpus-per-node=h100:8"),
        ("gpu_type: h100", 2, "--ntasks=2"),
        ("{gpus: gres, gpu_type: h100}", 2, "--gres=gpu:h100:8"),
        ("{gpus: none}", 2, "--ntasks=2"),
        ("constraint: h100&nvlink", 1, "-C 'h100&nvlink'"),
        ("qos: long", 1, "--qos=long"),
        ("{}", 1, "--exclusive"),
        ("memory_gb_per_rank: 32", 1, "--mem 256000"),
    ],
)
def test_a_gpu_job_asks_for_a_gpu_a_rank(tmp_path, facts, nodes, wanted):
    assert wanted in sbatch(load(tmp_path, facts), 8, nodes)


@pytest.mark.parametrize("facts", ["{}", "{gpus: gres, gpu_type: h100}", "{gpus: none}", "constraint: h100"])
def test_a_job_without_ranks_asks_for_no_gpu(tmp_path, facts):
    call = sbatch(load(tmp_path, facts), 0)
    assert not re.search(r"gpu|gres| -C |--exclusive", call)
    assert "--ntasks=1 --cpus-per-task=1" in call


def test_a_cluster_of_cpus_is_asked_for_none(tmp_path):
    call = sbatch(load(tmp_path, "{gpus: none, exclusive: false}"), 8)
    assert not re.search(r"gpu|gres|--exclusive", call)
    assert "--cpus-per-task=8" in call


def test_memory_and_cpus_are_what_the_file_says(tmp_path):
    cluster = load(tmp_path, "{memory_gb_per_rank: 64, memory_gb: 48, cpus_per_rank: 12}")
    timed, other = sbatch(cluster, 8), sbatch(cluster, 0)
    assert "--mem 512000" in timed
    assert "--cpus-per-task=96" in timed
    assert "--mem 48000" in other
    assert "--cpus-per-task=1" in other
    assert "--cpus-per-task=8" in sbatch(load(tmp_path, "{}"), 8)


def test_several_nodes_do_not_start_from_a_container(tmp_path):
    cluster = load(tmp_path, "container: /images/pat.sif")
    clusterfile.request(cluster, 8, 1)
    with pytest.raises(ConfigError, match=r"container: got '/images/pat.sif'; allowed: null with train.nodes = 2"):
        clusterfile.request(cluster, 8, 2)


def test_partitions(tmp_path):
    both = load(tmp_path, "{partition: gpu, cpu_partition: standard, account: rlhf}")
    assert clusterfile.request(both, 8)["slurm_partition"] == "gpu"
    assert clusterfile.request(both, 0)["slurm_partition"] == "standard"
    assert clusterfile.request(both, 0)["slurm_account"] == "rlhf"
    assert clusterfile.request(load(tmp_path, "partition: gpu"), 0)["slurm_partition"] == "gpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partitions: gpu", "cluster.yaml: partitions: got an unknown key; allowed: partition, "),
        ("gpus: gpu", "cluster.yaml: gpus: got 'gpu'; allowed: 'gpus', 'gres' or 'none'"),
        ("{modules: [cuda], conda: true}", "cluster.yaml: modules and conda: got both; allowed: one of"),
        ("{gpus: none, gpu_type: h100}", "cluster.yaml: gpu_type: got 'h100'; allowed: nothing"),
        ("container: images/pat.sif", "cluster.yaml: container: got 'images/pat.sif'; allowed: an absolute path"),
        ("[gpu]", "cluster.yaml: the whole file: got ['gpu']; allowed: a mapping with the keys partition"),
        ("partition: a\npartition: b", "cluster.yaml: partition: got it a second time"),
    ],
)
def test_mistakes_name_file_key_and_what_is_allowed(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert f"config error: {tmp_path}/{message}" in str(error.value)


def test_an_empty_file_is_a_cluster_with_defaults(tmp_path):
    assert load(tmp_path, "# nothing\n") == Cluster()


def test_the_environment_names_another_file(tmp_path, monkeypatch):
    (tmp_path / "other.yaml").write_text("partition: other")
    monkeypatch.setenv("PAT_CLUSTER", str(tmp_path / "other.yaml"))
    assert clusterfile.load().partition == "other"


def test_the_file_that_is_shipped_is_valid_and_names_no_site():
    file = ROOT / "config" / "cluster.yaml"
    cluster = clusterfile.load(file)
    assert (cluster.partition, cluster.account, cluster.qos, cluster.constraint) == (None,) * 4
    keys = set(re.findall(r"^#? ?(\w+):", file.read_text(), re.MULTILINE))
    assert keys <= set(Cluster.model_fields)


def test_docs_list_every_key():
    for name, field in Cluster.model_fields.items():
        (row,) = [line for line in DOCS.splitlines() if line.startswith(f"| `{name}` |")]
        assert row.endswith(f"| {field.description} |"), name


WANTED = {  # ranks, and what each example's GPU job must ask for, in sbatch's words
    "Partition, account and typed GPUs": (8, ["--gres=gpu:h100:8", "--exclusive", "--mem 512000"]),
    "GPUs by count, features and modules": (4, ["--gpus=4", "-C 'a100&80gb'", "--qos=normal"]),
    "A container, no accounting": (8, ["--gpus=h200:8"]),
}


@pytest.mark.parametrize("title", WANTED)
def test_examples_of_the_docs_ask_for_what_they_say(tmp_path, title):
    ranks, flags = WANTED[title]
    call = sbatch(load(tmp_path, EXAMPLES[title]), ranks)
    assert [flag for flag in flags if flag not in call] == []
    assert yaml.safe_load(EXAMPLES[title]).keys() <= Cluster.model_fields.keys()


def test_every_example_is_tested():
    assert EXAMPLES.keys() == WANTED.keys()


@pytest.mark.workflow
@pytest.mark.parametrize("title", WANTED)
def test_the_workflow_plans_with_each_example(tmp_path, monkeypatch, title):
    folder = copy_project(tmp_path)
    (folder / "config" / "cluster.yaml").write_text(EXAMPLES[title])
    apptainer = folder / "bin" / "apptainer"  # a double: Snakemake looks for it as soon as a container is named
    apptainer.parent.mkdir()
    apptainer.write_text("#!/bin/sh\necho apptainer version 1.3.4\n")
    apptainer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{apptainer.parent}:{os.environ['PATH']}")
    command = [sys.executable, "-m", "snakemake", "--profile", "slurm", "-n", "all", "--configfile", "config/ci.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Training, arm threshold6 (ci-llama)" in done.stderr + done.stdout
    (folder / "config" / "cluster.yaml").write_text(EXAMPLES[title] + "partion: x\n")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "config error: config/cluster.yaml: partion: got an unknown key" in done.stdout + done.stderr


@pytest.mark.workflow
def test_commands_of_the_docs_work(tmp_path):
    folder = copy_project(tmp_path)
    commands = re.findall(r"^ +(snakemake [^\n]+)$", DOCS, re.MULTILINE)
    assert len(commands) == 3
    for command in dict.fromkeys(commands):
        words = command.replace("my-experiment", "ci").split()
        words += [] if "--unlock" in words else ["-n"]
        done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    for file in re.findall(r"\b(?:envs|config|tests|workflow)/[\w./-]*\w", DOCS):
        assert (ROOT / file.replace("my-experiment", "ci")).exists(), file
