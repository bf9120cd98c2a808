"""The packages for GPUs: their set resolves, with the overrides and no others."""

import subprocess
import sys

import pytest

from tests.workflow.project import ROOT

UV = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
UV += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_34", "--extra", "published"]
SOURCES = ["pyproject.toml", "envs/cuda.in"]


def resolve(out, overrides: str) -> subprocess.CompletedProcess:
    """As envs/cuda.in says, from the versions in envs/cuda.txt where they still fit."""
    out.write_text((ROOT / "envs" / "cuda.txt").read_text())
    (out.parent / "overrides.txt").write_text(overrides)
    command = [*UV, "--override", str(out.parent / "overrides.txt"), *SOURCES, "--output-file", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_set_for_gpus_resolves_to_what_is_pinned(tmp_path):
    done = resolve(tmp_path / "cuda.txt", (ROOT / "envs" / "cuda-overrides.txt").read_text())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cuda.txt").read_text() == (ROOT / "envs" / "cuda.txt").read_text()


@pytest.mark.matrix
@pytest.mark.parametrize("package", ["transformers", "tokenizers", "numpy"])
def test_each_override_is_needed(tmp_path, package):
    overrides = (ROOT / "envs" / "cuda-overrides.txt").read_text().splitlines()
    done = resolve(tmp_path / "cuda.txt", "\n".join(line for line in overrides if not line.startswith(package)))
    assert done.returncode != 0
    assert package in done.stderr


def test_overrides_are_pinned_as_they_say():
    pins = (ROOT / "envs" / "cuda.txt").read_text().splitlines()
    assert {"transformers==5.10.4", "tokenizers==0.22.2", "sglang==0.5.23", "verl==0.9.1"} <= set(pins)
