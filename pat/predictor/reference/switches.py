"""What a change of tp costs on a machine that one does not have: derived, for nobody has published it.

| part | how | source |
| --- | --- | --- |
| agree | one decode step, which a switch waits for, and 5 ms | COORDINATION_S below |
| quiesce, collect, rebind | 3, 4 and 1 ms | COORDINATION_S |
| rebind | rows of fused weights that change places, read and written twice | memory bandwidth (systems.System) |
| collect | the leader of the busiest old replica writes its requests | WRITE below |
| resume | 1 ms, and 0.1 ms a request | COORDINATION_S, REQUEST_S |
| move | every rank deals all requests; the busiest new replica reads its own | PLACE, TAKE below |
| move | all-to-alls layer by layer, of the bytes of the busiest GPU | the machine's links (systems.link) |
| prefill, if KV is not moved | the contexts of the busiest new replica, one after the other | prefill table |

Weights cost no more: ranks are nested, so that each finds its new shard in what it holds, and the graphs and
communicators of every tp are resident. For an engine that reshards, set ``profile.switch_fixed_s`` (PAT as
published: 5.52 s a switch, 2.36 s of them KV, hence 3.16; arXiv 2605.23945).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import polars as pl

from pat.engine.parameters import Parameters
from pat.model import ModelSpec
from pat.predictor.reference.systems import Link

# Rounded medians of `pat profile` (config/ci.yaml: tiny-qwen3, SGLang 0.5.23, two CPU cores). They are messages
# between processes and bookkeeping in Python, which a GPU does not change; no GPU has measured them yet.
COORDINATION_S = {"agree_s": 5e-3, "quiesce_s": 3e-3, "collect_s": 4e-3, "rebind_s": 1e-3, "resume_s": 1e-3}
REQUEST_S = 1e-4
# The host's work for requests with log-probabilities, (seconds a request, seconds a token of its context): `pat bench
# switch` with 1024 requests of 64 and of 8192 tokens, the least of 8 runs on one core of an AMD EPYC which
# others used as well. 1024 requests of 8192 tokens from tp 1 to tp 8: 0.21 s in a single run, 0.18 s by these.
WRITE = (5e-5, 18e-9)
PLACE = (1.1e-5, 8e-9)
TAKE = (4.2e-5, 4e-9)
BF16 = 2  # bytes a number


def tables(
    spec: ModelSpec,
    ranks: int,
    tp_sizes: Sequence[int],
    shapes: Iterable[tuple[int, int]],
    link: Link,
    decode: Callable[[int, int, int], float],
    prefill: Callable[[int, int], float],
    rows: Callable[[int, int], float],
    fixed_s: float | None = None,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The tables switch and transfer, as `pat profile` writes them, for every pair of ``tp_sizes``.

    shapes: (requests, tokens in KV of each). ranks: GPUs of the node. Seconds of decode(tp, batch, context of each), of
    prefill(tp, tokens), and of rows(tp_from, tp_to): fused weights in another order. fixed_s: seconds of all but KV
    and re-admission, instead of the coordination, where the size changes.
    """
    switches, transfers = [], []
    for tp_from, tp_to in [(a, b) for a in tp_sizes for b in tp_sizes if a != b or a < ranks]:
        for requests, context in shapes:
            old, new = (-(-requests * tp // ranks) for tp in (tp_from, tp_to))  # of the busiest replica
            if tp_from == tp_to:  # a rebalance: these requests all leave one replica for the others
                old, new = requests, -(-requests // (ranks // tp_to - 1))
            phases, host_s = dict.fromkeys(COORDINATION_S, 0.0) | {"rebind_s": fixed_s or 0.0}, 0.0
            if fixed_s is None or tp_from == tp_to:
                phases = COORDINATION_S | {
                    "agree_s": COORDINATION_S["agree_s"] + decode(tp_from, old, context),
                    "rebind_s": COORDINATION_S["rebind_s"] + rows(tp_from, tp_to),
                    "collect_s": COORDINATION_S["collect_s"] + _host_s(WRITE, old, context),
                    "resume_s": COORDINATION_S["resume_s"] + REQUEST_S * requests,
                }
                host_s = _host_s(PLACE, requests, context) + _host_s(TAKE, new, context)
            moved = _busiest_bytes(spec, ranks, (tp_from, old), (tp_to, new), context)
            move_s = spec.layers * float(link.seconds(moved / spec.layers))
            shape = {"tp_from": tp_from, "tp_to": tp_to, "requests": requests}
            transfers.append(shape | {"bytes": round(moved), "seconds": move_s})
            for mode, kv_s, prefill_s in (
                ("migrate", move_s, 0.0),
                ("recompute", 0.0, new * prefill(tp_to, context)),
            ):
                row = shape | {"mode": mode, "kv_tokens": requests * context} | phases
                row |= {"move_s": host_s + kv_s, "prefill_s": prefill_s}
                switches.append(row | {"total_s": sum(row[name] for name in row if name.endswith("_s"))})
    order = ["tp_from", "tp_to", "mode", "requests", "kv_tokens", "agree_s", "quiesce_s", "collect_s", "move_s"]
    order += ["rebind_s", "resume_s", "prefill_s", "total_s"]
    repeat = pl.lit(0, pl.Int64).alias("repeat")
    transfer = pl.DataFrame(transfers).select("tp_from", "tp_to", "bytes", "requests", "seconds", repeat)
    return pl.DataFrame(switches).select(*order, repeat), transfer


def rows_bytes(config: Mapping[str, Any], tp_from: int, tp_to: int, base: int) -> float:
    """Bytes of fused weights that change places in a rank's shard, at most; config: the model's ``config.json``.

    For a size above the base, the rank's part of K, V and up goes to where its part of Q, or gate, ends, and what was
    there takes its place (``pat.engine.rows``).
    """
    shapes, kv_heads = Parameters(config).shapes, ModelSpec.from_hf(config).kv_heads
    total = 0.0
    for tp in {tp_from, tp_to} - {base} if tp_from != tp_to else ():
        for part, shares in (("k_proj.", min(tp, kv_heads)), ("v_proj.", min(tp, kv_heads)), ("up_proj.", tp)):
            total += 2 * BF16 * sum(prod(shape) for name, shape in shapes.items() if part in name) / shares
    return total


def _host_s(work: tuple[float, float], requests: int, context: int) -> float:
    per_request, per_token = work
    return requests * (per_request + context * per_token)


def _busiest_bytes(spec: ModelSpec, ranks: int, old: tuple[int, int], new: tuple[int, int], context: int) -> float:
    """Bytes of KV that the busiest GPU sends or gets; old, new: (tp, requests of the busiest replica).

    A rank holds its share of the heads of every token. Of what it holds, only that part stays which the same rank
    needs again: all tokens are dealt anew over the replicas, and ranks are nested, so 1 - min(tp) / ranks leave.
    At a rebalance all those that move do.
    """
    leaves = 1 - min(old[0], new[0]) / ranks if old[0] != new[0] else 1.0
    per_token = spec.kv_bytes_per_token(BF16)
    return leaves * context * max(n * per_token / min(tp, spec.kv_heads) for tp, n in (old, new))
