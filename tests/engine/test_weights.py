"""Views of the base shard: where a wider rank's part lies, and how experts' rows are put in order."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pat.engine.weights import ExpertRows, Place
from pat.layout import Layout


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


@pytest.mark.parametrize("counts", list(itertools.permutations((1, 2, 4))))
def test_each_part_has_its_gate_and_up_rows_in_one_piece(counts):
    experts, inner, hidden = 3, 8, 5
    gate, up = torch.randn(experts, inner, hidden), torch.randn(experts, inner, hidden)
    weight = torch.cat([gate, up], dim=1)
    address, rows = weight.data_ptr(), ExpertRows(weight)
    for count in (*counts, 1):
        rows.arrange(count)
        part = inner // count
        for index in range(count):
            piece = weight[:, 2 * part * index : 2 * part * (index + 1)]
            mine = slice(part * index, part * (index + 1))
            assert torch.equal(piece, torch.cat([gate[:, mine], up[:, mine]], dim=1))
    assert weight.data_ptr() == address
    assert torch.equal(weight, torch.cat([gate, up], dim=1))
