"""Hardware discovery: Slurm by pyslurm or sinfo, else this machine."""

import json
import os
import sys
from pathlib import Path

import pytest

from pat import cluster

GIB = 1 << 30


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder of made-up programs that is found before the real ones."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def add(name: str, text: str, code: int = 0) -> None:
        (tmp_path / f"{name}.out").write_text(text)
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\ncat {tmp_path}/{name}.out\nexit {code}\n")
        script.chmod(0o755)

    return add


def fake_pyslurm(folder: Path, monkeypatch, source: str) -> None:
    (folder / "pyslurm.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize(
    ("gres", "names"),
    [
        ("gpu:h200:8", ["h200"] * 8),
        ("gpu:2", ["gpu", "gpu"]),
        ("gpu:h200:1(S:0-1),tmp:1G", ["h200"]),
        ("gpu:a100:1,gpu:l40s:1", ["a100", "l40s"]),
        ("(null)", []),
        ("", []),
        ("fpga:2", []),
    ],
)
def test_parse_gres(gres, names):
    assert [device["name"] for device in cluster.parse_gres(gres)] == names


NODE = "NodeName={} Arch=x86_64 CPUAlloc=0 CPUTot={} AvailableFeatures={} Gres={} OS=Linux 6.1.0 RealMemory={} "
NODE += "State=IDLE Partitions={} Reason=Not responding [root@2026-01-01]\n"
N1 = NODE.format("n1", 64, "h200,nvlink", "gpu:h200:8(S:0-1)", 515000, "gpu,all")
N2 = NODE.format("n2", 32, "(null)", "(null)", 257000, "cpu")


def test_nodes_from_scontrol(programs):
    programs("scontrol", N1 + "\n" + N2)
    n1, n2 = cluster.from_scontrol()
    assert (n1["name"], n1["cpus"], n1["memory_bytes"], len(n1["devices"])) == ("n1", 64, 515000 << 20, 8)
    assert (n1["partitions"], n1["features"]) == (["all", "gpu"], ["h200", "nvlink"])
    assert (n2["name"], n2["memory_bytes"], n2["devices"]) == ("n2", 257000 << 20, [])
    assert (n2["partitions"], n2["features"]) == (["cpu"], [])


@pytest.mark.parametrize(("text", "code"), [(N1, 1), ("No nodes in the system\n", 0), ("", 0)])
def test_scontrol_that_has_no_answer_is_no_slurm(programs, text, code):
    programs("scontrol", text, code)
    assert cluster.from_scontrol() is None


# A contract double of pyslurm 25.11 (pyslurm/core/node.pyx): what PAT reads of it, with the same names and types.
PYSLURM = """
class Node:
    name, total_cpus, real_memory, configured_gres = "n1", 64, 1024, {"gpu:h200": 2, "shard": 4}
    partitions, available_features = ["gpu"], None
class Nodes:
    load = staticmethod(lambda: {"n1": Node()})
"""


def test_pyslurm_comes_first(programs, tmp_path, monkeypatch):
    programs("scontrol", N2)
    fake_pyslurm(tmp_path, monkeypatch, PYSLURM)
    facts = cluster.discover()
    assert facts["source"] == "pyslurm"
    (node,) = facts["nodes"]
    assert (node["name"], node["cpus"], node["memory_bytes"]) == ("n1", 64, GIB)
    assert [device["name"] for device in node["devices"]] == ["h200", "h200"]
    assert (node["partitions"], node["features"]) == (["gpu"], [])


def test_pyslurm_that_ends_the_interpreter_is_survived(programs, tmp_path, monkeypatch):
    fake_pyslurm(tmp_path, monkeypatch, "import os\nos._exit(1)\n")
    programs("scontrol", N2)
    assert cluster.discover()["source"] == "slurm"


def test_a_pyslurm_that_does_not_fit_is_named_with_the_release_that_does(programs, tmp_path, monkeypatch):
    fake_pyslurm(tmp_path, monkeypatch, "import os\nos._exit(1)\n")
    programs("scontrol", "slurm-wlm 24.05.3\n")
    monkeypatch.setattr(cluster, "version", lambda name: {"pyslurm": "25.11.2"}[name])
    what, cure = cluster.pyslurm_mismatch()
    assert what.startswith("pyslurm 25.11.2 does not work with Slurm 24.05")
    assert "pip install 'pyslurm==24.5.*'" in cure
    fake_pyslurm(tmp_path, monkeypatch, PYSLURM)
    assert cluster.pyslurm_mismatch() is None


def test_this_machine(programs):
    programs("scontrol", "", code=1)
    programs("nvidia-smi", "NVIDIA H200, 143771, 580.95.05\nNVIDIA H200, 143771, 580.95.05\n")
    facts = cluster.discover()
    assert cluster.unheard(facts) == "Slurm"  # its command is there and fails
    assert facts["source"] == "local"
    (node,) = facts["nodes"]
    assert node["cpus"] == len(os.sched_getaffinity(0))
    assert node["memory_bytes"] > 0
    assert node["devices"] == [{"kind": "gpu", "name": "NVIDIA H200", "memory_bytes": 143771 << 20}] * 2
    assert node["driver"] == "580.95.05"
    assert facts["cpu_model"]
    assert facts["versions"]["python"] == sys.version.split()[0]
    assert facts["versions"]["sglang"] == "0.5.23"


def test_stage_writes_what_it_found(programs, tmp_path, capsys):
    programs("scontrol", N1.replace("515000", "524288"))
    cluster.run(tmp_path)
    assert json.loads((tmp_path / "hardware.json").read_text())["nodes"][0]["name"] == "n1"
    assert "n1: 64 cores, 512 GiB, 8 x h200" in capsys.readouterr().out
