"""Names and shapes of each family's parameters are those of Hugging Face's own models; what is refused, and how."""

import json

import pytest

from pat.engine.cpu import environment
from pat.engine.parameters import Given, Parameters, WeightsRefused

environment.prepare()  # before anything imports transformers

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
MODELS = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biased": ("llama", {"attention_bias": True}),
    "llama, heads wider than the hidden size": ("llama", {"head_dim": 16}),
    "mistral": ("mistral", {"head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),  # without a head_dim of its own: 128
    "qwen3, biased": ("qwen3", {"attention_bias": True, "head_dim": 8, "tie_word_embeddings": True}),
    "experts": ("qwen3_moe", EXPERTS),
    "experts in every other layer": ("qwen3_moe", EXPERTS | {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "experts but in one layer": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [1], "attention_bias": True}),
}


@pytest.mark.parametrize("family, extra", MODELS.values(), ids=MODELS)
def test_they_are_those_of_a_checkpoint_of_hugging_face(family, extra, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from pat.engine import checkpoint

    config = AutoConfig.for_model(family, **SMALL | extra)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size="40KB")
    held = list(checkpoint.tensors(str(tmp_path), "auto"))
    assert len({tensor.file for tensor in held}) > 1
    for given in (json.loads((tmp_path / "config.json").read_text()), SMALL | extra | {"model_type": family}):
        given |= {"max_position_embeddings": 64}
        parameters = checkpoint.parameters_of(given)
        assert parameters.required == {tensor.name for tensor in held}
        assert parameters.check(held, complete=True) == parameters.required
        assert {tensor.name: tensor.shape for tensor in held}.items() <= parameters.shapes.items()


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "pt", "npcache"])
def test_the_files_are_those_that_sglang_loads(load_format, tmp_path, monkeypatch):
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader

    from pat.engine import checkpoint

    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    for name in (
        "model-1.safetensors",
        "stale.safetensors",
        "model.bin",
        "training_args.bin",
        "model.pt",
        "optimizer.pt",
    ):
        (tmp_path / name).touch()
    monkeypatch.setattr(loader, "get_server_args", lambda: None)
    theirs = loader.DefaultModelLoader(LoadConfig(load_format=load_format))._prepare_weights(str(tmp_path), None, True)[
        1
    ]
    assert sorted(map(str, checkpoint.files(str(tmp_path), load_format))) == sorted(theirs)
    assert theirs


def test_files_of_torch_are_read_without_their_weights(tmp_path):
    import torch

    from pat.engine import checkpoint

    torch.save({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.bin")
    found = list(checkpoint.tensors(str(tmp_path), "auto"))
    assert found == [Given("a", (2, 3), "float32", "model.bin"), Given("b", (4,), "int8", "model.bin")]


@pytest.mark.parametrize(
    "content, load_format, message",
    [
        (None, "auto", r"no weights there: no file \*\.safetensors or \*\.bin or \*\.pt"),
        (b"\x08\0\0\0\0\0\0\0{}", "auto", r"model\.safetensors cannot be read as weights: "),
        (b"", "dummy", "load_format='dummy' has no files: allowed are auto, "),
    ],
)
def test_a_folder_without_readable_weights(content, load_format, message, tmp_path):
    from pat.engine import checkpoint

    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsRefused, match=message):
        list(checkpoint.tensors(str(tmp_path), load_format))


@pytest.fixture
def parameters():
    return Parameters(SMALL | {"model_type": "llama", "max_position_embeddings": 64, "tie_word_embeddings": True})


def whole(parameters, **changes):
    """All tensors, in one file but for ``changes``: name -> Given or None."""
    given = {name: Given(name, shape, "BF16", "a.safetensors") for name, shape in parameters.shapes.items()}
    given |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return [tensor for tensor in given.values() if tensor]


def test_a_tied_head_may_be_given_and_old_buffers_are_skipped(parameters):
    given = whole(parameters)
    assert parameters.check(given, complete=True) == parameters.required
    assert parameters.check([one for one in given if one.name != "lm_head.weight"], complete=True)
    old = Given("model.layers.0.self_attn.rotary_emb.inv_freq", (4,), "F32")
    assert parameters.check([*given, old], complete=True) == parameters.required
    assert parameters.check([], complete=False) == frozenset()
    never_tied = Parameters(
        SMALL | EXPERTS | {"model_type": "qwen3_moe", "max_position_embeddings": 64, "tie_word_embeddings": True}
    )
    assert "lm_head.weight" in never_tied.required


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model__norm__weight": None}, r"^1 of 20 tensors are missing: model\.norm\.weight$"),
        (
            {f"model__layers__1__mlp__{part}_proj__weight": None for part in ("gate", "up", "down")}
            | {"model__layers__1__input_layernorm__weight": None},
            r"^4 of 20 tensors are missing: model\.layers\.1\.mlp\.gate_proj\.weight, .*, and 1 more$",
        ),
        (
            {"x": Given("module.model.norm.weight", (32,), "F32", "b.bin")},
            r"^the model has no module\.model\.norm\.weight \(b\.bin\), did you mean model\.norm\.weight\?$",
        ),
        (
            {"model__norm__weight": Given("model.norm.weight", (64,), "F32", "b.bin")},
            r"^model\.norm\.weight \(b\.bin\) is of shape \[64\] and must be of \[32\]$",
        ),
        (
            {"lm_head__weight": Given("lm_head.weight", (95, 32), "F32")},
            r"^lm_head\.weight is of shape \[95, 32\] and must be of \[96, 32\]$",
        ),
        (
            {"model__norm__weight": Given("model.norm.weight", (32,), "F8_E4M3", "b.bin")},
            r"^model\.norm\.weight \(b\.bin\) is of type F8_E4M3 and must be of floating point, not quantised$",
        ),
        (
            {"again": Given("model.norm.weight", (32,), "F32", "b.bin")},
            r"^model\.norm\.weight is there twice \(a\.safetensors\) \(b\.bin\)$",
        ),
        (
            {f"x{i}": Given(f"x{i}", (1,), "F32") for i in range(7)},
            r"^the model has no x0; the model has no x1; the model has no x2; and 4 more$",
        ),
    ],
)
def test_what_is_wrong_is_named(parameters, changes, message):
    with pytest.raises(WeightsRefused, match=message):
        parameters.check(whole(parameters, **changes), complete=True)
