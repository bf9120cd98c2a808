"""pat doctor: what it finds, and that it says what helps."""

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from pat import doctor

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_this_environment_is_sound(capsys):
    assert doctor.run(Path("config/ci.yaml"))
    out = capsys.readouterr().out
    assert "problem" not in out
    assert "ci-qwen3, ci-llama" in out
    assert out.rstrip().endswith("PAT can run here.")


def test_bad_configuration_is_a_problem(tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text((ROOT / "config" / "ci.yaml").read_text().replace("ranks: 2", "ranks: no"))
    assert not doctor.run(path)
    assert "config error: ranks: got False" in capsys.readouterr().out


def test_wrong_and_missing_packages():
    numpy = importlib.metadata.version("numpy")
    assert doctor._packages(f"# a comment\nnumpy=={numpy}\n").level == "ok"
    finding = doctor._packages("numpy==0.1\nno-such-package==1.0\n")
    assert (finding.level, finding.cure) == ("problem", "make env")
    assert f"numpy {numpy} (wants 0.1), no-such-package missing (wants 1.0)" in finding.what


@pytest.mark.parametrize(
    ("torch", "gpus", "wanted"),
    [("2.13.0+cpu", 1, "cpu"), ("2.13.0", 1, "cuda"), (None, 1, "cuda"), ("2.13.0", 0, "cpu"), (None, 0, "cpu")],
)
def test_the_packages_that_are_wanted_follow_the_torch_that_is_installed(monkeypatch, torch, gpus, wanted):
    def version(name):
        if torch is None:
            raise doctor.PackageNotFoundError(name)
        return torch

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"] * gpus))
    assert doctor._requirements(slurm=False) == wanted


def test_local_build_of_a_pinned_version_is_right(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "2.13.0+cpu")
    assert doctor._packages("torch==2.13.0\n").level == "ok"


@pytest.mark.parametrize("times", [0, 2])
def test_plugin_that_is_not_there_once(monkeypatch, times):
    entry = importlib.metadata.EntryPoint("pat", "pat.config", "sglang.srt.plugins")
    monkeypatch.setattr(doctor, "entry_points", lambda group: [entry] * times)
    assert {finding.level for finding in doctor._plugins()} == {"problem"}


def test_plugin_that_does_not_load(monkeypatch):
    entry = importlib.metadata.EntryPoint("pat", "pat.nothing:here", "sglang.srt.plugins")
    monkeypatch.setattr(doctor, "entry_points", lambda group: [entry])
    finding = next(doctor._plugins())
    assert finding.level == "problem"
    assert "ModuleNotFoundError" in finding.what


def test_little_space_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "GIB", 1 << 60)
    assert {finding.level for finding in doctor._space()} == {"warning"}


CFG = SimpleNamespace(ranks=2, profile=SimpleNamespace(source="engine"))


@pytest.fixture
def promised(tmp_path, monkeypatch):
    """Writes the cluster's facts that count."""
    monkeypatch.setenv("PAT_CLUSTER", str(tmp_path / "cluster.yaml"))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    return (tmp_path / "cluster.yaml").write_text


def test_a_node_as_promised_is_accepted(promised):
    promised("{gpus: gres, requirements: cpu}")
    for stage in ("assets", "profile", "train-pat", "simulate"):
        doctor.check_node(stage, CFG)


def test_a_node_with_other_packages_is_refused(promised):
    promised("{requirements: cuda}")
    with pytest.raises(SystemExit) as error:
        doctor.check_node("train-pat", CFG)
    text = str(error.value)
    assert text.startswith("error: node node7 cannot run stage train-pat (Slurm job 17, envs/cuda.txt): torch 2.13.0")
    assert "uv pip install --no-deps -r envs/cuda.txt" in text
    assert "cluster.yaml" in text


def test_a_node_without_its_gpus_is_refused(promised, monkeypatch):
    """With the versions taken as right: on a machine without GPUs torch sees none."""
    promised("{requirements: cuda}")
    monkeypatch.setattr(doctor, "_wrong", lambda pins, names=None: [])
    for stage in ("profile", "train-tp1"):
        with pytest.raises(SystemExit, match="sees 0 GPUs; 2 are needed"):
            doctor.check_node(stage, CFG)
    doctor.check_node("assets", CFG)
    promised("{requirements: cuda, gpus: none}")
    doctor.check_node("train-tp1", CFG)


def test_light_stages_run_anywhere(promised):
    promised("{requirements: cuda}")
    for stage in ("hardware", "report", "tracking"):
        doctor.check_node(stage, CFG)


def test_both_sets_pin_what_a_node_is_asked_for():
    for name in ("cpu", "cuda"):
        pins = (ROOT / "envs" / f"{name}.txt").read_text()
        assert {package for package in doctor.NODE_PACKAGES if f"\n{package}==" in pins} == set(doctor.NODE_PACKAGES)
