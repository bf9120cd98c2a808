"""What PAT cannot carry across a change of size, refused before anything starts or is sent; pure but for one file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pat.layout import Layout, legal_tp
from pat.model import PADDABLE, UnsupportedModel

# Options of SGLang: (values that change nothing, besides None and False; why any other is refused).
_SIZE, _NONE, _NAME = (1,), (), ("none", "null", "off", "auto")
_PLAIN = ("auto", "safetensors", "pt", "fastsafetensors", "npcache", "dummy")
_SHARDED = "PAT divides a model by tensor parallelism only"
_QUANTISED = "packed quantised weights cannot be viewed as a narrower shard"
_OUTSIDE = "KV that is kept outside of the pool has the heads of one size and is not moved"
_ELSEWHERE = "all sizes are views of the weights in each rank's own memory, which must stay there"
_ONE_SIZE = "it keeps communication buffers or a compiled model for one size"
_STRIDED = "only this kernel is known to take weights that are views with strides, in the order of a checkpoint"
_BATCHES = "a switch needs a step boundary with one batch"
_TEXT = "PAT generates text"
OPTIONS: dict[str, tuple[tuple, str]] = {
    "tp_size": (_NONE, "PAT sets it: give ranks= and tp_sizes="),
    "dp_size": (_NONE, "PAT sets it: give ranks= and tp_sizes="),
    "server_args": (_NONE, "PAT sets some of its fields: give the fields as arguments"),
    "custom_sigquit_handler": (_NONE, "PAT reports a failed process as EngineDead to whoever waits for the engine"),
    "pp_size": (_SIZE, "a pipeline stage holds other layers on every rank, so a shard of one is no shard of another"),
    "nnodes": (_SIZE, "a switch moves KV inside one node; run one engine a node"),
    "use_ray": (_NONE, "a switch moves KV inside one node; run one engine a node"),
    "ep_size": (_SIZE, _SHARDED),
    "moe_dp_size": (_SIZE, _SHARDED),
    "moe_dense_tp_size": (_NONE, _SHARDED),
    "moe_a2a_backend": (_NAME, _SHARDED),
    "enable_eplb": (_NONE, _SHARDED),
    "elastic_ep_backend": (_NONE, _SHARDED),
    "attn_dp_size": (_SIZE, _SHARDED),
    "enable_dp_attention": (_NONE, _SHARDED),
    "enable_dp_lm_head": (_NONE, _SHARDED),
    "attn_cp_size": (_SIZE, _SHARDED),
    "dcp_size": (_SIZE, _SHARDED),
    "dwdp_size": (_SIZE, _SHARDED),
    "load_balance_method": (("auto", "round_robin"), "the other methods send requests to ranks that follow a leader"),
    "sampling_backend": (("pytorch",), "PAT draws the tokens itself, in this one's place"),
    "rl_on_policy_target": (_NONE, "SGLang then rounds a request's probabilities by what its neighbours ask for"),
    "enable_watermark": (_NONE, "what a watermark knows of a request's tokens is not moved"),
    "quantization": (_NAME, _QUANTISED),
    "modelopt_quant": (_NONE, _QUANTISED),
    "rl_quant_profile": (_NONE, _QUANTISED),
    "load_format": (_PLAIN, "weights are taken from checkpoints with Hugging Face's names and no quantisation"),
    "model_impl": (("auto", "sglang"), "PAT knows how to divide the layers of SGLang's own models"),
    "speculative_algorithm": (_NONE, "the draft model's state is not moved"),
    "dllm_algorithm": (_NONE, "the state of a diffusion block is not moved"),
    "enable_lora": (_NONE, "adapters are sharded apart from the weights"),
    "lora_paths": (_NONE, "adapters are sharded apart from the weights"),
    "page_size": (_SIZE, "KV moves by the token"),
    "kv_cache_dtype": (("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"), "the scales of its blocks are not moved"),
    "quantization_param_path": (_NONE, "the scales of its KV are known to the model of one size only"),
    "scheduler_recv_interval": (_SIZE, "ranks that become one replica would skip at different steps"),
    "enable_prefill_delayer": (_NONE, "ranks that become one replica would delay differently"),
    "enable_page_major_kv_layout": (_NONE, "KV moves by layer, and the pool must be laid out so"),
    "enable_kv_cache_sharding": (_NONE, _OUTSIDE),
    "enable_unified_memory": (_NONE, _OUTSIDE),
    "enable_hierarchical_cache": (_NONE, _OUTSIDE),
    "enable_hisparse": (_NONE, _OUTSIDE),
    "enable_lmcache": (_NONE, _OUTSIDE),
    "enable_flexkv": (_NONE, _OUTSIDE),
    "radix_cache_backend": (_NONE, _OUTSIDE),
    "prefill_only_disable_kv_cache": (_NONE, "there would be no KV to go on with"),
    "weight_cache_mode": (_NAME, _ELSEWHERE),
    "cpu_offload_gb": ((0,), _ELSEWHERE),
    "offload_group_size": ((-1, 0), _ELSEWHERE),
    "enable_symm_mem": (_NONE, _ONE_SIZE),
    "enable_mscclpp": (_NONE, _ONE_SIZE),
    "enable_layernorm_sp": (_NONE, _ONE_SIZE),
    "enable_tp_lm_head_all_to_all": (_NONE, _ONE_SIZE),
    "enable_flashinfer_allreduce_fusion": (_NONE, _ONE_SIZE),
    "flashinfer_allreduce_fusion_backend": (_NONE, _ONE_SIZE),
    "enable_nvidia_megakernel": (_NONE, _ONE_SIZE),
    "enable_amd_monokernel": (_NONE, _ONE_SIZE),
    "bf16_gemm_backend": (("auto", "torch"), _STRIDED),  # auto: see environment.kernels
    "moe_runner_backend": (("auto", "triton"), _STRIDED),
    "enable_two_batch_overlap": (_NONE, _BATCHES),
    "enable_pdmux": (_NONE, _BATCHES),
    "disaggregation_mode": (_NAME, "prefill and decode must share the ranks"),
    "tokenizer_worker_num": (_SIZE, "what is unfinished must be known in one process"),
    "enable_streaming_session": (_NONE, "what a session keeps is not moved"),
    "enable_session_radix_cache": (_NONE, "what a session keeps is not moved"),
    "enable_strict_thinking": (_NONE, "the state of a grammar is not moved"),
    "is_embedding": (_NONE, _TEXT),
    "enable_multimodal": (_NONE, _TEXT),
    "encoder_only": (_NONE, _TEXT),
}

# Families whose sizes are tested against Hugging Face: model_type and architecture of a config.json.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

_GRAMMAR = "the state of a grammar (structured output) is not moved to another rank"
_SESSION = "what a session keeps on a rank is not moved to another one"
_LOCATED = "it is recorded by location in the KV pool, which changes"
REQUEST = {
    "image_data": _TEXT,
    "video_data": _TEXT,
    "audio_data": _TEXT,
    "input_embeds": "a request whose KV is computed again is known by its token ids only",
    "positional_embed_overrides": "a request whose KV is computed again is known by its token ids only",
    "lora_path": "adapters are sharded apart from the weights",
    "session_params": _SESSION,
    "custom_logit_processor": "its state is not moved to another rank",
    "require_reasoning": _GRAMMAR,
    "routed_dp_rank": "which replicas there are changes; requests are dealt to them evenly",
    "data_parallel_rank": "which replicas there are changes; requests are dealt to them evenly",
    "return_routed_experts": _LOCATED,
    "return_indexer_topk": _LOCATED,
}
# Sampling parameters: (value that changes nothing, why any other is refused).
SAMPLING = dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), (None, _GRAMMAR)) | {
    "beam_width": (1, "the beams of a search are not moved together"),
}


# SGLang puts these into tensors unseen: its scheduler, and the engine with it, would end with an error.
WHOLE, LARGEST = ("max_new_tokens", "min_new_tokens", "top_k"), (1 << 31) - 1


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument of sglang.Engine that PAT does not support, saying why."""
    for name, (harmless, reason) in OPTIONS.items():
        value = options.get(name)
        if value is None or value is False or (value is not True and value in harmless):
            continue
        raise ValueError(f"{name}={value!r} is not supported: {reason}")


def check_sizes(tp_sizes: tuple[int, ...], ranks: int | None) -> tuple[tuple[int, ...], int]:
    """The sizes in ascending order and the number of ranks, by default the largest size.

    Raises ValueError unless each size divides the next one and the ranks.
    """
    sizes = tuple(sorted(set(tp_sizes)))
    if not sizes:
        raise ValueError("tp_sizes is empty: give at least one tensor-parallel size")
    ranks = ranks or sizes[-1]
    for tp in sizes:
        Layout(ranks, tp)  # raises if it does not divide
    for narrow, wide in pairwise(sizes):
        if wide % narrow:
            raise ValueError(f"tp_sizes={sizes}: {narrow} does not divide {wide}, so no shard lies inside another")
    return sizes, ranks


def read_config(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The Hugging Face configuration of a checkpoint folder or hub name, as SGLang will read it.

    Raises OSError if there is none.
    """
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(source, revision=options.get("revision"))
    return config | json.loads(options.get("json_model_override_args") or "{}")


def check_model(config: Mapping[str, Any], tp_sizes: tuple[int, ...], ranks: int) -> None:
    """Raise UnsupportedModel, a ValueError, if the model of this ``config.json`` cannot be run at every size."""
    family = config.get("model_type")
    if reasons := list(_peculiarities(config)):
        raise UnsupportedModel(f"a model of type {family!r} is not supported: {'; '.join(reasons)}")
    architecture = (config.get("architectures") or [None])[0]
    if FAMILIES.get(family) != architecture:
        raise UnsupportedModel(
            f"{architecture} (model_type {family!r}) is not supported: PAT has been tested with "
            f"{', '.join(FAMILIES.values())}, and another model may be divided in another way"
        )
    if found := [problem for tp in tp_sizes for problem in _undivided(config, tp)]:
        possible = [tp for tp in range(1, ranks + 1) if ranks % tp == 0 and not list(_undivided(config, tp))]
        padding = "; `pat assets` can pad the heads of such a checkpoint" if family in PADDABLE else ""
        raise UnsupportedModel(
            f"the model cannot be divided: {'; '.join(found)}. With {ranks} ranks it can at tp "
            f"{', '.join(map(str, possible)) or 'none'}{padding}"
        )


def _peculiarities(config: Mapping[str, Any]) -> Iterator[str]:
    """What of a model is not a plain decoder with K and V of every head and token."""
    family = config.get("model_type")
    layers = set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("quantization_config") or config.get("compression_config"):
        yield f"its weights are quantised, and {_QUANTISED}"
    if config.get("kv_lora_rank"):
        yield "its heads share a latent (MLA, kv_lora_rank), which has no shards to move"
    sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
    if sliding or config.get("attention_chunk_size") or layers & {"sliding_attention", "chunked_attention"}:
        yield "its attention has a sliding window, whose KV is in pools of its own"
    if layers - {"sliding_attention", "chunked_attention"} or any(
        key.startswith(("mamba_", "ssm_", "linear_num_", "hybrid_override")) for key in config
    ):
        yield "it has mamba or linear-attention layers, whose state is not moved"
    if config.get("dual_chunk_attention_config"):
        yield "its attention is sparse (dual chunk), with a state of its own"
    if config.get("mlp_bias") or config.get("bias") or (config.get("attention_bias") and family == "mistral"):
        yield "it has biases that SGLang or Hugging Face leaves out of such a model"
    if config.get("is_encoder_decoder"):
        yield "it is an encoder-decoder"
    if any(config.get(key) for key in ("vision_config", "audio_config", "text_config", "thinker_config")):
        yield f"it is multimodal, and {_TEXT}"


def _undivided(config: Mapping[str, Any], tp: int) -> Iterator[str]:
    """What of the model ``tp`` ranks cannot share evenly."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if tp not in legal_tp(heads, kv_heads, tp):
        yield f"{heads} query and {kv_heads} KV heads by tp {tp}"
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if (size := config.get(name) or 0) % tp:
            yield f"{name} {size} by tp {tp}"


def check_request(request) -> None:
    """Raise ValueError for a GenerateReqInput with something that PAT does not support, naming it and saying why."""
    for name, reason in REQUEST.items():
        if _given(getattr(request, name, None)):
            raise ValueError(f"{name} is not supported: {reason}")
    params = getattr(request, "sampling_params", None)
    for one in params if isinstance(params, (list, tuple)) else [params]:
        for name in SAMPLING.keys() & (one or {}).keys():
            harmless, reason = SAMPLING[name]
            if _given(one[name]) and one[name] != harmless:
                raise ValueError(f"sampling_params[{name!r}] is not supported: {reason}")
        _check_numbers(one or {})


def _check_numbers(params: Mapping[str, Any]) -> None:
    for name in WHOLE:
        value = params.get(name)
        if value is not None and not (isinstance(value, int) and value <= LARGEST):
            raise ValueError(f"sampling_params[{name!r}] is {value!r}: give a whole number up to {LARGEST}")
    for token, bias in (params.get("logit_bias") or {}).items():
        if not isinstance(bias, (int, float)):
            raise ValueError(f"sampling_params['logit_bias'][{token!r}] is {bias!r}: give a number")


def check_token_ids(ids: Sequence[int] | None, vocabulary: int) -> None:
    """Raise ValueError unless a prompt has ids and all are the model's; in an embedding, others end the engine.

    vocabulary: how many tokens the model knows.
    """
    if ids is None:  # SGLang says what is missing
        return
    if not len(ids):
        raise ValueError("the prompt is empty: it needs at least one token")
    if min(ids) < 0 or max(ids) >= vocabulary:
        wrong = next(i for i, token in enumerate(ids) if not 0 <= token < vocabulary)
        raise ValueError(
            f"token {wrong} of the prompt has the id {ids[wrong]}; this model's are 0 to {vocabulary - 1}: was the "
            "prompt made with another tokenizer?"
        )


def _given(value) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_given(one) for one in value)
    if isinstance(value, dict):
        return bool(value)
    return value is not None and value is not False
