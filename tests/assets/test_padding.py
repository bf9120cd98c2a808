"""Zero heads change neither what a model computes nor what it learns."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pat.assets.padding import logit_difference, pad_heads
from pat.model import UnsupportedModel

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
KINDS = [("llama", True), ("qwen2", False), ("qwen3", True), ("mistral", False)]
TOKENS = torch.arange(1, 13)[None]


def make(kind: str, tied: bool):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, tie_word_embeddings=tied))
    for parameter in model.parameters():  # norms and biases start as ones and zeros, which would hide a mistake
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_same_logits(kind, tied):
    model = make(kind, tied)
    padded = pad_heads(model, 4)
    assert (padded.config.num_attention_heads, padded.config.num_key_value_heads) == (8, 4)
    assert logit_difference(model, padded, TOKENS) < 1e-6


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_added_heads_stay_zero_in_training(kind, tied):
    model = make(kind, tied)
    padded = pad_heads(model, 4)
    for each in (model, padded):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
    for name, new in padded.state_dict().items():
        old = model.state_dict()[name]
        rest = new.clone()
        rest[tuple(slice(0, n) for n in old.shape)] = 0
        assert rest.abs().max() == 0, name
    assert logit_difference(model, padded, TOKENS) < 1e-4


def test_refusals():
    with pytest.raises(UnsupportedModel, match="cannot be cut"):
        pad_heads(make("llama", True), 2)
    gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=32, n_head=2))
    with pytest.raises(UnsupportedModel, match="not gpt2"):
        pad_heads(gpt2, 4)
