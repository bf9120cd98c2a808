"""pat doctor: what it finds, and that it says what helps."""

import importlib.metadata
from pathlib import Path

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
