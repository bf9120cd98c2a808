"""What a profile measures: decode and prefill at a batch and context, switches, a whole generation (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Decode:
    """``batch`` requests a replica with ``context`` tokens in KV each."""

    tp: int
    batch: int
    context: int

    def __str__(self) -> str:
        return f"tp{self.tp} decode, batch {self.batch}, context {self.context}"


@dataclass(frozen=True)
class Prefill:
    """``requests`` fresh prompts of ``tokens`` tokens on each replica."""

    tp: int
    requests: int
    tokens: int

    def __str__(self) -> str:
        return f"tp{self.tp} prefill, {self.requests} x {self.tokens} tokens"


@dataclass(frozen=True)
class Switch:
    """From ``tp`` to ``other`` and back with ``requests`` unfinished requests of ``context`` tokens."""

    tp: int
    other: int
    requests: int
    context: int
    kv: str

    def __str__(self) -> str:
        return f"tp{self.tp} <-> tp{self.other}, {self.requests} requests of {self.context} tokens, {self.kv}"


@dataclass(frozen=True)
class Rebalance:
    """``requests`` unfinished requests of ``context`` tokens, all on one replica, are spread over all of them."""

    tp: int
    requests: int
    context: int
    kv: str

    def __str__(self) -> str:
        return f"tp{self.tp} rebalanced, {self.requests} requests of {self.context} tokens, {self.kv}"


@dataclass(frozen=True)
class Generation:
    """A generation stage of ``requests`` requests with prompts and responses of many lengths up to these."""

    tp: int
    requests: int
    prompt: int
    response: int

    def __str__(self) -> str:
        return f"tp{self.tp} generation, {self.requests} requests of up to {self.response} tokens"


LEVELS = 10  # response lengths of a generation; with more, a batch would last for too few steps to tell its latency
Point = Decode | Prefill | Switch | Rebalance | Generation


def points(cfg, repeat: int) -> Iterator[Point]:
    """One repeat of what is measured. A wider replica also gets the batch that it has when all are merged."""
    batches, contexts, prefill = (
        sorted(values) for values in (cfg.profile.batches, cfg.profile.contexts, cfg.profile.prefill)
    )
    sizes = sorted(cfg.tp_sizes, reverse=repeat % 2 == 1)
    for context in contexts:
        for batch in batches:
            for tp in sizes:
                yield Decode(tp, batch, context)
        for tp in sizes:
            if tp > min(sizes):
                yield Decode(tp, batches[-1] * tp // min(sizes), context)
    for tokens in prefill:
        for tp in sizes:
            yield Prefill(tp, 1, tokens)
    most = batches[-1]  # as many as arrive at once when a generation begins
    for requests, tokens in sorted({(min(4, most), prefill[0]), (most, prefill[0]), (most, prefill[-1])}):
        for tp in sizes:
            yield Prefill(tp, requests, tokens)
    for tp in sizes:
        yield Generation(
            tp,
            batches[-1] * cfg.ranks // min(sizes),
            prefill[-1],
            min(4 * cfg.profile.steps, cfg.rollout.max_response),
        )
    shapes = {(batches[0], contexts[0]), (min(4, batches[-1]), contexts[-1]), (batches[-1], contexts[0])}
    for a, b in [(a, b) for a in cfg.tp_sizes for b in cfg.tp_sizes if a < b]:
        for requests, context in sorted(shapes):
            for kv in ("migrate", "recompute"):
                yield Switch(a, b, requests, context, kv)
    for tp in sizes:
        if tp < cfg.ranks:
            for requests, context in sorted({(max(2, min(4, most)), contexts[-1]), (max(2, most), contexts[0])}):
                for kv in ("migrate", "recompute"):
                    yield Rebalance(tp, requests, context, kv)


def spread(most: int, count: int, levels: int) -> list[int]:
    """``count`` whole numbers up to ``most``, of ``levels`` evenly spaced sizes: so long do as many requests last."""
    return [max(1, most * (1 + i * levels // count) // levels) for i in range(count)]
