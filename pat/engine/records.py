"""What is kept of a switch: the records of all ranks as one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pat.engine.transaction import PHASES
from pat.policy import Decision

Rows = list[list[tuple[int, int, int]]]  # live_rows() of the engine


def merge(ranks: list[dict], asked: float, decision: Decision | None = None, rows: Rows | None = None) -> dict:
    """The ranks' records as one. A phase ends when the slowest rank ends it; the first begins at ``asked``.

    Times are seconds, ``asked`` and ``end`` on the clock of time.monotonic(). live: what was decided on.
    """
    ends = [asked, *(max(rank["ends"][name] for rank in ranks) for name in PHASES)]
    phases = {name: after - before for name, (before, after) in zip(PHASES, pairwise(ends), strict=True)}
    counted = {
        "unfinished": ranks[0]["unfinished"],
        "requests_moved": ranks[0]["requests_moved"],
        "kv_tokens_moved": ranks[0]["kv_tokens_moved"],
        "kv_tokens_recomputed": ranks[0]["kv_tokens_recomputed"],
        "bytes_moved": sum(rank["bytes_moved"] for rank in ranks),
        "exchange_s": max(rank["exchange_s"] for rank in ranks),
    }
    first = ranks[0]
    return _record(first["tp_from"], first["tp_to"], first["kv"], asked, ends[-1], counted, phases, decision, rows)


def nothing(tp: int, kv: str, now: float, decision: Decision | None = None, rows: Rows | None = None) -> dict:
    """The record of a switch to the size that the engine has: it took no time."""
    return _record(tp, tp, kv, now, now, {}, {}, decision, rows)


def _record(tp_from, tp_to, kv, asked, end, counted, phases, decision, rows) -> dict[str, Any]:
    counts = ("unfinished", "requests_moved", "kv_tokens_moved", "kv_tokens_recomputed", "bytes_moved")
    return {
        "tp_from": tp_from,
        "tp_to": tp_to,
        "kv": kv,
        "asked": asked,
        "end": end,
        **{name: counted.get(name, 0) for name in counts},
        "exchange_s": counted.get("exchange_s", 0.0),
        **{f"{name}_s": phases.get(name, 0.0) for name in PHASES},
        "total_s": end - asked,
        "predicted_saving_s": decision.saving_s if decision else None,
        "predicted_cost_s": decision.cost_s if decision else None,
        "live": rows,
    }
