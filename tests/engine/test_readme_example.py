"""The README's example of pat.Engine runs as it stands."""

import re
import subprocess
import sys

import pytest

from pat.assets import models
from tests.workflow.project import ROOT

README = (ROOT / "README.md").read_text()


def examples():
    return [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "pat.Engine" in code]


def test_there_is_one_and_it_is_short():
    (code,) = examples()
    assert 15 <= len([line for line in code.splitlines() if line.strip()]) <= 25


@pytest.mark.engine
def test_it_runs(tmp_path):
    (code,) = examples()
    model = tmp_path / "model"
    models.write("tiny-qwen3", "float32", (1, 2), 0, model)
    script = tmp_path / "example.py"
    script.write_text(code.replace("results/smollm2-gsm/model", str(model)))
    assert str(model) in script.read_text()
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "at Layout(ranks=2, tp=2)" in done.stdout
    assert re.search(r"^\[\(1, 2, \d+\), \(2, 1, 0\)\]$", done.stdout, re.MULTILINE), done.stdout
