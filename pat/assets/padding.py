"""All-zero attention heads, so that a model divides over ranks that its own head count does not allow."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pat.model import PADDABLE, UnsupportedModel


def pad_heads(model: PreTrainedModel, kv_heads: int) -> PreTrainedModel:
    """A copy of ``model`` with ``kv_heads`` KV heads, query heads in proportion; the added ones are all zero.

    A zero value head outputs zero and its columns of the output projection are zero too, so the logits are
    those of ``model``, and all gradients of the added numbers are zero, so training keeps them so. Heads are
    appended: query head i stays in the group of KV head i // group.
    Raises UnsupportedModel for an architecture without this form.
    """
    old = model.config
    if old.model_type not in PADDABLE:
        raise UnsupportedModel(f"heads can be added only to {', '.join(PADDABLE)}, not {old.model_type}")
    if kv_heads < old.num_key_value_heads:
        raise UnsupportedModel(f"{old.num_key_value_heads} KV heads cannot be cut to {kv_heads}")
    group = old.num_attention_heads // old.num_key_value_heads
    head_dim = getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads
    changed = {"num_attention_heads": group * kv_heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config = type(old).from_dict({**old.to_dict(), **changed})
    padded = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    source, target = model.state_dict(), padded.state_dict()
    for name, tensor in target.items():
        tensor.zero_()
        tensor[tuple(slice(0, n) for n in source[name].shape)] = source[name]
    padded.load_state_dict(target)
    padded.generation_config = model.generation_config
    return padded


@torch.no_grad()
def logit_difference(model: PreTrainedModel, padded: PreTrainedModel, tokens: torch.Tensor) -> float:
    """Largest difference of the two models' logits on ``tokens`` [1, T], relative to the largest logit."""
    reference, logits = model(tokens).logits.float(), padded(tokens).logits.float()
    return ((logits - reference).abs().max() / reference.abs().max()).item()
