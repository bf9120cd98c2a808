"""What a stage's results rest on: which files, packages and facts of the machine count for which stage, and how."""

import os
from pathlib import Path

import pytest
import yaml

from pat import basis, machine
from pat.config import SECTIONS, Config
from pat.digest import Digests, code
from tests.workflow.project import ROOT


def config(**changes) -> Config:
    raw = yaml.safe_load((ROOT / "config" / "ci.yaml").read_text())
    del raw["experiments"]
    for section, values in changes.items():
        raw[section] = raw.get(section, {}) | values
    return Config.model_validate(raw)


def digest_of(path: Path, text: str) -> str:
    path.write_text(text)
    code.cache_clear()
    return code(path)


def test_comments_docstrings_and_layout_of_code_do_not_count(tmp_path):
    path = tmp_path / "a.py"
    first = digest_of(path, 'def f(x):\n    return x + 1\n\n\nNAME = "f"\n')
    assert (
        digest_of(
            path, '"""Doc."""\n# why\ndef f(x):\n    """Doc."""\n    return (x +\n  1)\nNAME = \'f\'\n"""of NAME"""'
        )
        == first
    )
    assert digest_of(path, 'def f(x):\n    return x + 2\n\n\nNAME = "f"\n') != first
    assert digest_of(path, 'def f(x):\n    return x + 1\n\n\nNAME = "g"\n') != first
    assert digest_of(path, "def f(x:") == digest_of(path, "def f(x:") != first  # of what is no Python, the contents
    page = tmp_path / "a.j2"
    assert digest_of(page, "{# a #}") != digest_of(page, "{# b #}")


def test_a_file_is_read_again_when_its_times_change_and_not_before(tmp_path, monkeypatch):
    path, known = tmp_path / "weights.safetensors", tmp_path / "known" / "digests.json"
    path.write_bytes(b"a" * 1000)
    os.utime(path, (1e9, 1e9))
    monkeypatch.setattr("pat.digest.FRESH_S", -1.0)  # also what has only just changed is kept
    (first,) = Digests(known).of([path]).values()
    read = []
    monkeypatch.setattr("pat.digest._digest", lambda file: read.append(file) or "read")
    assert Digests(known).of([path]) == {str(path): first}
    assert read == []
    path.write_bytes(b"b" * 1000)
    os.utime(path, (1e9, 1e9))  # its time of modification is what it was
    assert Digests(known).of([path]) == {str(path): "read"}
    known.write_text("{")  # torn
    assert Digests(known).of([path]) == {str(path): "read"}
    assert len(read) == 2


def test_what_has_just_changed_is_not_taken_for_known(tmp_path):
    path, known = tmp_path / "prompts.parquet", tmp_path / "digests.json"
    path.write_bytes(b"a")
    Digests(known).of([path])
    assert str(path) not in known.read_text()


def test_the_files_that_settings_name_count_for_the_stages_that_read_them(tmp_path):
    own = {name: tmp_path / name for name in ("prompts.parquet", "reward.py", "template.jinja", "lengths.csv")}
    for path in own.values():
        path.write_text("x = 1")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model-1.safetensors", "README.md"):
        (tmp_path / "model" / name).write_text("{}")
    made = config(
        model={"source": str(tmp_path / "model")},
        data={"source": str(own["prompts.parquet"])},
        train={"extra": {"reward.custom_reward_function": {"path": str(own["reward.py"])}, "a": [1, str(tmp_path)]}},
        rollout={"sglang": {"chat_template": str(own["template.jinja"])}},
        simulate={"lengths": {"kind": "file", "path": str(own["lengths.csv"])}},
    )
    names = {stage: {path.name for path in basis.files(stage, made)} for stage in SECTIONS}
    assert names["assets"] == {"prompts.parquet", "config.json", "model-1.safetensors"}
    assert names["profile"] == {"template.jinja"}
    assert names["train"] == names["train-pat"] == {"reward.py", "template.jinja"}
    assert names["simulate"] == {"lengths.csv"}
    assert all(not names[stage] for stage in ("hardware", "predictor", "report", "tracking"))
    looked_up = made.model_copy(update={"profile": made.profile.model_copy(update={"source": "aiconfigurator"})})
    assert [path.name for path in basis.files("profile", looked_up)] == ["config.json"]
    assert basis.packages("profile", looked_up) == ["aiconfigurator-core"]


def test_every_package_that_counts_is_pinned():
    pins = basis.pinned({name for names in basis.PACKAGES.values() for name in names}, "cuda")
    assert set(pins) == {name for names in basis.PACKAGES.values() for name in names}
    assert set(basis.pinned(basis.SOURCES.values(), "cpu")) == set(basis.SOURCES.values())


def facts(source="local", *devices, **changes) -> dict:
    memory = 80 << 30 if source == "local" else None
    gpus = [{"kind": "gpu", "name": name, "memory_bytes": memory} for name in devices]
    node = {"name": "n1", "cpus": 8, "memory_bytes": 64 << 30, "devices": gpus, "links": None, "driver": None}
    node |= {"partitions": ["gpu"], "features": []} | changes
    return {"source": source, "hostname": "here", "nodes": [node], "cpu_model": "CPU", "versions": {}}


def timed(known: dict, partition=None, gpu_type=None) -> dict:
    return machine.of(known, partition, gpu_type)["timed"]


def test_of_this_machine_the_kind_of_gpus_and_the_driver_count():
    h100 = timed(facts("local", "H100", "H100", driver="580"))
    assert h100 == timed(facts("local", "H100", driver="580", name="n2", memory_bytes=65 << 30))
    assert h100 != timed(facts("local", "H200", driver="580"))
    assert h100 != timed(facts("local", "H100", driver="590"))
    assert timed(facts())["cpu"] == "CPU"


def test_of_a_cluster_the_types_of_gpus_that_are_asked_for_count():
    known = facts("slurm", "h100", "h100")
    more = known | {"nodes": known["nodes"] * 2}
    assert timed(known) == timed(more)  # a node more
    assert machine.of(known, None, None)["nodes"] == machine.of(known | {"hostname": "login2"}, None, None)["nodes"]
    other = facts("slurm", "h200", name="n2", partitions=["new"])["nodes"]
    mixed = known | {"nodes": known["nodes"] + other}
    assert timed(known) != timed(mixed)
    assert timed(known, "gpu") == timed(mixed, "gpu")
    assert timed(known, None, "h100") == timed(mixed, None, "h100")


def test_a_moments_silence_is_no_other_machine():
    slurm, here = timed(facts("slurm", "h100")), timed(facts())
    assert machine.standing(slurm, here, "Slurm") == slurm
    assert machine.standing(slurm, here, None) == here
    assert machine.standing(here, {"source": "other"}, "Slurm") == {
        "source": "other"
    }  # its tools are there, it never was
    assert machine.standing(timed(facts("local", "H100")), here, "nvidia-smi") == timed(facts("local", "H100"))
    assert machine.standing({}, here, "Slurm") == here


@pytest.mark.parametrize("stage", ["hardware", "assets", "profile", "predictor", "train-tp1", "simulate", "report"])
def test_a_basis_has_the_parts_that_its_stage_depends_on(stage, tmp_path):
    now = machine.of(facts(), None, None)
    found = basis.of(stage, config(), Digests(tmp_path / "known.json"), basis.installed, now)
    parts = {"hardware": {"packages", "machine"}, "assets": {"packages"}, "predictor": set(), "simulate": set()}
    assert set(found) == {"code"} | parts.get(stage, {"packages", "machine"} if stage != "report" else set())


def test_a_difference_is_told_in_a_few_words():
    before = {"code": {"engine/kv.py": "1", "seam.py": "1"}, "packages": {"sglang": "0.5.22"}, "machine": {"gpus": []}}
    now = {"code": {"engine/kv.py": "2", "seam.py": "1"}, "packages": {"sglang": "0.5.23"}, "files": {"a.py": "1"}}
    told = ["code: engine/kv.py", "packages: sglang 0.5.22 -> 0.5.23", "files: a.py"]
    assert basis.differences(before, now | {"machine": {"gpus": []}}) == told
    assert basis.differences(before, before) == []
    assert basis.differences({}, {"machine": {"gpus": ["H100 80 GiB"]}}) == ["machine: gpus nothing -> H100 80 GiB"]
