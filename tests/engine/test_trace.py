"""Steps of an engine: which of them a switch caused, and which are worth learning from."""

from itertools import pairwise

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.engine.trace import decode_steps, readmission_s

COLUMNS = {
    "start": float,
    "seconds": float,
    "decode": int,
    "tp": int,
    "batch": int,
    "context": int,
    "rank": int,
}


def steps(*rows) -> pl.DataFrame:
    """Steps from (rank, start, seconds, decode, tp, batch)."""
    records = [
        {
            "start": float(start),
            "seconds": float(seconds),
            "decode": decode,
            "tp": tp,
            "batch": batch,
            "context": 10 * i,
        }
        | {"rank": rank}
        for i, (rank, start, seconds, decode, tp, batch) in enumerate(rows)
    ]
    return pl.DataFrame(records, schema=COLUMNS)


def test_readmission_is_the_prefill_between_a_switch_and_the_next_decode_step():
    table = steps(
        (0, 1, 3.0, 0, 1, 4),  # before the switch
        (0, 5, 0.5, 0, 2, 4),
        (0, 6, 0.25, 0, 2, 4),
        (0, 7, 0.1, 1, 2, 4),
        (0, 8, 7.0, 0, 2, 1),  # a new request, later
    )
    assert readmission_s(table, end=5) == 0.75


def test_the_slowest_rank_counts():
    table = steps((0, 5, 0.5, 0, 1, 2), (1, 5, 2.0, 0, 1, 2), (0, 6, 0.1, 1, 1, 2), (0, 7, 4.0, 0, 1, 2))
    assert readmission_s(table, end=4) == 2.0


def test_a_prefill_that_another_replica_began_before_the_last_rank_was_through_counts_from_there():
    table = steps((1, 4.75, 2.0, 0, 1, 2), (0, 5.5, 0.1, 1, 1, 2), (1, 7, 0.1, 1, 1, 2))
    assert readmission_s(table, end=5) == 1.75


@pytest.mark.parametrize("table", [steps(), steps((0, 1, 2.0, 0, 1, 1)), steps((0, 6, 0.1, 1, 1, 1))])
def test_no_prefill_after_a_switch_costs_nothing(table):
    assert readmission_s(table, end=5) == 0.0


# (rank, start, seconds, decode, tp, batch); no two steps of a rank start together
ROWS = st.lists(
    st.tuples(*(st.integers(*span) for span in ((0, 1), (0, 1000), (1, 8), (0, 1), (1, 2), (1, 2)))),
    max_size=25,
    unique_by=lambda row: row[:2],
)


@settings(deadline=None)
@given(rows=ROWS, end=st.integers(0, 1000))
def test_readmission_counts_each_rank_by_itself(rows, end):
    total = {0: 0.0, 1: 0.0}
    for rank in total:
        for _, start, seconds, decode, *_ in sorted(row for row in rows if row[0] == rank):
            left = min(seconds, start + seconds - end)
            if left > 0 and decode:
                break
            total[rank] += max(left, 0.0)
    assert readmission_s(steps(*rows), end) == max(total.values())


@settings(deadline=None)
@given(ROWS)
def test_a_decode_step_is_kept_if_the_one_before_it_on_its_rank_was_alike(rows):
    kept = set()
    for rank in (0, 1):
        mine = sorted(row for row in rows if row[0] == rank)
        for before, row in pairwise(mine):
            if row[3] == 1 and before[3:] == row[3:]:
                kept.add((row[0], float(row[1])))
    found = decode_steps(steps(*rows))
    assert set(found.select("rank", "start").iter_rows()) == kept
    assert found.height == len(kept)


def test_a_decode_step_keeps_its_numbers():
    table = steps((0, 1, 0.5, 1, 2, 3), (0, 2, 0.25, 1, 2, 3))
    assert decode_steps(table).to_dicts() == [
        {"tp": 2, "batch": 3, "context": 10, "seconds": 0.25, "start": 2.0, "rank": 0}
    ]
