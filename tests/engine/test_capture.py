"""Which batches a size captures graphs for: those of the base, and on from there, not too many."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pat.engine.capture import batches


@given(st.sets(st.integers(1, 512), min_size=1), st.integers(1, 16), st.integers(1, 8192), st.floats(0, 1e5))
def test_lists_hold_the_bases_and_grow_by_an_eighth(base, factor, requests, rows):
    got = batches(base, factor, requests, rows)
    assert got == sorted(set(got))
    assert [bs for bs in got if bs <= max(base)] == sorted(base)
    assert got[-1] <= max(max(base), min(max(base) * factor, requests, rows))
    new = got[len(base) - 1 :]
    assert len(new) <= 9 * (1 + factor.bit_length())
    assert all(b - a <= max(1, a / 8) for a, b in pairwise(new))
