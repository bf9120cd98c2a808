"""Views of the base shard: where a wider rank's part lies, and how the rows of fused layers are put in order."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Module

from pat.engine import sglang_api as sg
from pat.engine.rows import FusedRows, _permute, moves, order
from pat.engine.weights import Place, UnsupportedModel, row_parts
from pat.layout import Layout

HEAD, HEADS = 2, 8


@given(base=st.integers(1, 4), wider=st.integers(1, 4), dp=st.integers(1, 3))
def test_a_place_is_the_part_of_the_base_shard_that_the_wide_rank_owns(base, wider, dp):
    ranks = base * wider * dp
    narrow, wide = Layout(ranks, base), Layout(ranks, base * wider)
    rows = list(range(12 * wide.tp))
    for rank in range(ranks):
        place = Place.of(narrow, wide, rank)
        shard = rows[narrow.tp_rank(rank) * 12 * wider :][: 12 * wider]
        assert place.count == wider
        assert shard[place.index * 12 :][:12] == rows[wide.tp_rank(rank) * 12 :][:12]


def layer(kind, **shape):
    """A layer of SGLang's class without SGLang's groups: what ``row_parts`` reads of it."""
    made = kind.__new__(kind)
    Module.__init__(made)
    for name, value in shape.items():
        setattr(made, name, value)
    return made


def qkv(layout, rank, kv_heads):
    """The layer, and its rows as SGLang loads them: (Q, K or V; head; row of the head), numbered."""
    mine, q = layout.kv_heads(rank, kv_heads), HEADS // layout.tp
    made = layer(sg.QKVParallelLinear, head_size=HEAD, num_heads=q, num_kv_heads=len(mine))
    heads = (
        [("q", layout.tp_rank(rank) * q + i) for i in range(q)] + [("k", i) for i in mine] + [("v", i) for i in mine]
    )
    return made, torch.tensor(
        [1000 * "qkv".index(part) + 10 * head + row for part, head in heads for row in range(HEAD)]
    )


def gate_up(layout, rank, inner=16):
    made = layer(sg.MergedColumnParallelLinear, output_partition_sizes=[inner // layout.tp] * 2)
    mine = torch.arange(inner).view(layout.tp, -1)[layout.tp_rank(rank)]
    return made, torch.cat([mine, 1000 + mine])


def experts(layout, rank, inner=16):
    made, rows = gate_up(layout, rank, inner)
    return layer(sg.FusedMoE, intermediate_size_per_partition=made.output_partition_sizes[0]), rows


BUILDS = {f"{heads} KV heads": lambda *where, heads=heads: (*qkv(*where, heads), heads) for heads in (1, 2, 4, 8)}
BUILDS |= {"gate and up": lambda *where: (*gate_up(*where), 1), "experts": lambda *where: (*experts(*where), 1)}


@pytest.mark.parametrize("base", [1, 2])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_fused_layer_is_one_view_at_every_size_and_the_base_comes_back_bit_by_bit(build, base):
    """For each rank: the rows that SGLang would load there, at one address, whatever sizes came before."""
    narrow, sizes = Layout(8, base), [tp for tp in (1, 2, 4, 8) if tp > base]
    for rank in range(8):
        source, loaded, kv_heads = build(narrow, rank)
        weights = [loaded, loaded[:, None] * torch.ones(1, 3), torch.stack([loaded[:, None] + e for e in (0.0, 0.25)])]
        weights = [weight.clone() for weight in weights]  # a bias, a matrix and the matrices of experts
        as_loaded, rows, views, wanted = [w.clone() for w in weights], FusedRows(base), {}, {}
        for tp in sizes:
            wide = Layout(8, tp)
            made, wanted[tp], _ = build(wide, rank)
            first = tuple(layout.kv_heads(rank, kv_heads).start for layout in (narrow, wide))
            parts = row_parts(source, made, Place.of(narrow, wide, rank), first)
            views[tp] = [rows.view(tp, weight, parts) for weight in weights]
            assert all(view[0].is_contiguous() for view in views[tp])
        for tp in [*itertools.chain(*itertools.permutations([*sizes, base])), base]:
            rows.arrange(tp)
            if tp == base:
                assert all(torch.equal(weight, was) for weight, was in zip(weights, as_loaded, strict=True))
                continue
            bias, matrix, several = views[tp]
            assert torch.equal(bias, wanted[tp])
            assert torch.equal(matrix, wanted[tp][:, None] * torch.ones(1, 3))
            assert torch.equal(several[1] - 0.25, several[0])
            assert torch.equal(several[0][:, 0], wanted[tp].float())


def test_few_rows_move():
    """Q, and gate, stay where they are: a share of K, V and up changes places with what follows Q, or gate."""
    places, _ = moves(6144, (), ((0, 512), (4096, 128), (5120, 128)), torch.device("cpu"))  # Llama-3.1-8B at tp 8
    assert len(places) == 512
    places, _ = moves(28672, (), ((1792, 1792), (16128, 1792)), torch.device("cpu"))
    assert len(places) == 2 * 1792


def test_a_layer_that_a_size_pads_is_refused():
    base, wide = (layer(sg.FusedMoE, intermediate_size_per_partition=size) for size in (192, 128))
    with pytest.raises(UnsupportedModel, match=r"\[192, 192\] rows are not 2 parts of \[128, 128\]"):
        row_parts(base, wide, Place(0, 2), (0, 0))


@settings(max_examples=30)
@given(blocks=st.integers(1, 3), columns=st.integers(1, 9), chunk=st.integers(1, 200), seed=st.integers(0, 9))
def test_a_change_of_order_takes_no_more_memory_than_it_says(blocks, columns, chunk, seed):
    parts = ((2, 2), (8, 1), (11, 1))
    weight = torch.randn(blocks, 12, columns, generator=torch.Generator().manual_seed(seed))
    places, sources = moves(12, (), parts, torch.device("cpu"))
    expected, largest = weight[:, order(12, parts)], 0

    class Seen(torch.Tensor):
        def index_select(self, *arguments):
            nonlocal largest
            taken = super().index_select(*arguments)
            largest = max(largest, taken.numel() * taken.element_size())
            return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pat.engine.rows.CHUNK_BYTES", chunk)
        _permute(weight.as_subclass(Seen), places, sources)
    assert torch.equal(weight, expected)
    assert 0 < largest <= max(chunk, len(places) * 4)
