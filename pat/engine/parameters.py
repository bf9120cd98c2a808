"""The parameters of a model as Hugging Face names and shapes them, and whether given weights are these (pure)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pat.model import ModelSpec

# Old checkpoints keep what the rotary embedding computes for itself; SGLang and Hugging Face skip it.
IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")
SHOWN = 3  # problems, or names, in a message


class WeightsRefused(ValueError):
    """Weights that are not those of the model; the message names tensor, shape and file. Nothing has been written."""


class Given(NamedTuple):
    """A tensor that is to be loaded. dtype: as safetensors or torch call it. file: where it is, if in one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str = ""

    @property
    def where(self) -> str:
        return f" ({self.file})" if self.file else ""


class Parameters:
    """Of a model of one of the families in ``engine.refusals``, from its configuration.

    config: with all keys that its family has. shapes: of every tensor that a checkpoint may hold. required: the names
    that it must hold; with tied embeddings lm_head.weight may be there, and is the embedding's.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.shapes = dict(_shapes(config))
        tied = config.get("tie_word_embeddings") and config["model_type"] != "qwen3_moe"  # SGLang never ties that one
        self.required = frozenset(self.shapes) - ({"lm_head.weight"} if tied else set())

    def check(self, given: Iterable[Given], complete: bool) -> frozenset[str]:
        """The required names among ``given``.

        complete: all of them must be there. Raises WeightsRefused naming what is unknown, missing or there twice, of
        another shape, or not of floating point.
        """
        seen: dict[str, Given] = {}
        problems: list[str] = []
        for tensor in given:
            if not IGNORED.search(tensor.name):
                problems += self._problems(tensor, seen.get(tensor.name), hints=len(problems) < SHOWN)
                seen[tensor.name] = tensor
        missing = sorted(self.required - seen.keys(), key=list(self.shapes).index) if complete else []
        if missing:
            problems.insert(0, f"{len(missing)} of {len(self.required)} tensors are missing: {_some(missing, ', ')}")
        if problems:
            raise WeightsRefused(_some(problems, "; "))
        return self.required & seen.keys()

    def _problems(self, tensor: Given, twice: Given | None, hints: bool) -> Iterable[str]:
        name, shape = tensor.name, self.shapes.get(tensor.name)
        if shape is None:
            close = difflib.get_close_matches(name, self.shapes, n=1) if hints else []
            yield f"the model has no {name}{tensor.where}" + (f", did you mean {close[0]}?" if close else "")
        elif tuple(tensor.shape) != shape:
            yield f"{name}{tensor.where} is of shape {list(tensor.shape)} and must be of {list(shape)}"
        elif tensor.dtype not in FLOATS:
            yield f"{name}{tensor.where} is of type {tensor.dtype} and must be of floating point, not quantised"
        if twice:
            yield f"{name} is there twice{twice.where}{tensor.where}"


def _some(items: list[str], separator: str) -> str:
    more = len(items) - SHOWN
    return separator.join(items[:SHOWN]) + (f"{separator}and {more} more" if more > 0 else "")


def _shapes(config: Mapping[str, Any]) -> Iterable[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each tensor, in the order of the layers."""
    spec, family = ModelSpec.from_hf(config), config["model_type"]
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention = {"q": (q_rows, spec.hidden), "k": (kv_rows, spec.hidden), "v": (kv_rows, spec.hidden)}
    attention["o"] = (spec.hidden, q_rows)
    biased = "qkv" if family == "qwen2" else "qkvo" if config.get("attention_bias") and family != "mistral" else ""
    yield "model.embed_tokens.weight", (spec.vocab, spec.hidden)
    for number in range(spec.layers):
        layer = f"model.layers.{number}"
        for part, shape in attention.items():
            yield f"{layer}.self_attn.{part}_proj.weight", shape
            if part in biased:
                yield f"{layer}.self_attn.{part}_proj.bias", shape[:1]
        if family.startswith("qwen3"):
            yield from ((f"{layer}.self_attn.{part}_norm.weight", (spec.head_dim,)) for part in "qk")
        if family == "qwen3_moe" and _is_sparse(config, number):
            experts = config.get("num_experts") or config["num_local_experts"]
            yield f"{layer}.mlp.gate.weight", (experts, spec.hidden)
            for expert in range(experts):
                yield from _mlp(f"{layer}.mlp.experts.{expert}", spec.hidden, config["moe_intermediate_size"])
        else:
            yield from _mlp(f"{layer}.mlp", spec.hidden, spec.intermediate)
        yield f"{layer}.input_layernorm.weight", (spec.hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (spec.hidden,)
    yield "model.norm.weight", (spec.hidden,)
    yield "lm_head.weight", (spec.vocab, spec.hidden)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterable[tuple[str, tuple[int, ...]]]:
    for part in ("gate", "up"):
        yield f"{prefix}.{part}_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts; the rule of Hugging Face's Qwen3MoeDecoderLayer."""
    dense = layer in (config.get("mlp_only_layers") or ())
    return not dense and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
