"""pat.Engine works whatever was imported before it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from pat.assets import models
from pat.engine.cpu import environment, stand_ins

SCRIPT = """
import sys
{imports}

if __name__ == "__main__":
    engine = pat.Engine(model_path=sys.argv[1], tp_sizes=(1,), max_total_tokens=256, log_level="error")
    answer = engine.generate("1 + 1 =", {{"max_new_tokens": 5, "ignore_eos": True}})
    engine.shutdown()
    print("tokens", len(answer["output_ids"]))
"""
ORDERS = (
    "import pat, transformers",
    "import transformers, pat",
    # each of these asks transformers for what it then believes to lack
    "import sglang; from transformers import AutoProcessor, AutoImageProcessor, pipeline; import pat",
)


@pytest.mark.engine
@pytest.mark.skipif(environment.has_accelerator(), reason="for machines without an accelerator")
@pytest.mark.parametrize("imports", ORDERS)
def test_in_any_order(imports, tmp_path):
    models.write("tiny-qwen3", "float32", (1,), 0, tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(imports=imports), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "model")],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert "tokens 5" in done.stdout, done.stderr[-3000:]


def test_a_transformers_with_other_internals_is_told_with_the_way_out(monkeypatch):
    monkeypatch.setattr(stand_ins, "needed", lambda: True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "transformers.utils.import_utils", SimpleNamespace())
    monkeypatch.setattr("transformers.utils.import_utils", SimpleNamespace())
    with pytest.raises(ImportError, match=r"from pat import Engine.*before transformers"):
        stand_ins.add()
