"""The stand-in's hash is MurmurHash3, of which a seeded token is a function."""

import importlib.util
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.engine.cpu.stand_ins import STUBS


@pytest.fixture(scope="module")
def stub():
    """The stand-in, its ops in a namespace of their own: SGLang may have loaded it, or a real sgl_kernel."""
    spec = importlib.util.spec_from_file_location("sgl_kernel_stand_in", STUBS / "sgl_kernel.py")
    module = importlib.util.module_from_spec(spec)
    library = torch.library.Library
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.library, "Library", lambda _name, kind: library("pat_stand_in", kind))
        spec.loader.exec_module(module)
    return module


def murmur3(data: bytes, seed: int = 0) -> int:
    """MurmurHash3_x86_32 of whole 4-byte blocks, after Austin Appleby's reference."""
    mask, h = 0xFFFFFFFF, seed
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        h = (h * 5 + 0xE6546B64) & mask
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


@pytest.mark.parametrize(
    ("data", "seed", "hashed"),
    [(b"", 1, 0x514E28B7), (b"\xff\xff\xff\xff", 0, 0x76293B50), (b"\x21\x43\x65\x87", 0, 0xF55B516B),
     (b"test", 0, 0xBA6BD213), (b"\x00\x00\x00\x00", 0, 0x2362F9DE)],
)  # fmt: skip
def test_the_reference_gives_the_published_values(data, seed, hashed):
    assert murmur3(data, seed) == hashed


POSITIONS = st.integers(0, 2**31 - 1)


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2**64 - 1), POSITIONS), min_size=1, max_size=4),
    columns=st.lists(POSITIONS, min_size=1, max_size=5),
)
def test_every_element_is_the_hash_of_its_seed_position_and_column(stub, rows, columns):
    seeds, positions = zip(*rows, strict=True)
    hashed = stub.murmur_hash32(np.array(seeds, np.uint64), np.array(positions, np.int64), np.array(columns, np.int64))
    assert hashed.dtype == np.uint32
    assert hashed.tolist() == [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns] for seed, position in rows
    ]


def test_the_op_takes_and_gives_tensors_as_sglang_does(stub):
    seeds = torch.tensor([0, 7, 2**31 - 1]).to(torch.uint64)
    positions, columns = torch.tensor([0, 5, 100]), torch.arange(300)
    hashed = torch.ops.pat_stand_in.murmur_hash32_cpu.default(seeds, positions, columns)
    assert (hashed.dtype, hashed.shape) == (torch.uint32, (3, 300))
    for row, column in ((0, 0), (1, 299), (2, 17)):
        packed = struct.pack("<QII", int(seeds[row]), int(positions[row]), column)
        assert int(hashed[row, column]) == murmur3(packed)


def test_a_row_does_not_depend_on_its_batch(stub):
    seeds, positions, columns = np.arange(5, dtype=np.uint64), np.arange(5) + 10, np.arange(64)
    together = stub.murmur_hash32(seeds, positions, columns)
    for row in range(5):
        alone = stub.murmur_hash32(seeds[row : row + 1], positions[row : row + 1], columns)
        assert alone.tolist() == [together[row].tolist()]


def test_new_cache_locations_are_written_where_each_request_goes_on(stub):
    table = torch.full((4, 6), -1, dtype=torch.int32)
    stub.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]),
        table,
        torch.tensor([1, 0]),
        torch.tensor([4, 2]),
        torch.tensor([9, 8, 7, 6, 5]),
        6,
    )
    blank = [-1] * 6
    assert table.tolist() == [[6, 5, -1, -1, -1, -1], blank, [-1, 9, 8, 7, -1, -1], blank]


def test_an_op_without_a_stand_in_says_what_to_install(stub):
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.some_op has no CPU stand-in"):
        stub.some_op(1, 2)
    with pytest.raises(AttributeError):
        _ = stub.__wrapped__
