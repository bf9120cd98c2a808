"""Which ranks form which replica at each tensor-parallel size, and who owns which KV heads (pure).

Ranks 0..N-1 share a node. Rank r's tensor-parallel rank at size ``tp`` is r * tp // N, whatever the size: its shard
at a wider size lies inside its shard at every narrower size that divides it. So widening moves no weights between
ranks, and the KV heads that a rank keeps are among those that it has. A replica is every (N / tp)-th rank, in
ascending order as torch wants a group's ranks, and a wider replica is a union of narrower ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """``ranks`` ranks divided into replicas of ``tp`` ranks each.

    Raises ValueError if ``tp`` does not divide ``ranks``.
    """

    ranks: int
    tp: int

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ranks % self.tp:
            raise ValueError(f"tp {self.tp} does not divide {self.ranks} ranks")

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return self.ranks // self.tp

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each replica, in tp-rank order; the first is the replica's leader."""
        return tuple(tuple(range(i, self.ranks, self.dp)) for i in range(self.dp))

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(range(self.dp))

    def replica(self, rank: int) -> int:
        return rank % self.dp

    def tp_rank(self, rank: int) -> int:
        return rank // self.dp

    def rank(self, replica: int, tp_rank: int) -> int:
        return tp_rank * self.dp + replica

    def kv_heads(self, rank: int, kv_heads: int) -> range:
        """KV heads that ``rank`` holds of a model with ``kv_heads`` of them.

        With fewer heads than ranks each head is held by ``tp / kv_heads`` neighbouring ranks.
        """
        tp_rank = self.tp_rank(rank)
        if kv_heads >= self.tp:
            per_rank = kv_heads // self.tp
            return range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
        head = tp_rank * kv_heads // self.tp
        return range(head, head + 1)


def neighbours(ranks: int, tp_sizes: Sequence[int]) -> list[int]:
    """The ranks in an order in which the replicas of every size are consecutive: how to put them on devices in a row.

    Each size must divide the next.
    """
    sizes = sorted(tp_sizes, reverse=True)
    return sorted(range(ranks), key=lambda rank: [Layout(ranks, tp).replica(rank) for tp in sizes] + [rank])


def legal_tp(heads: int, kv_heads: int, ranks: int) -> tuple[int, ...]:
    """Tensor-parallel sizes that ``ranks`` ranks can run a model with ``heads`` query and ``kv_heads`` KV heads at.

    tp must divide the ranks and the query heads; KV heads are either divided or replicated evenly.
    """
    return tuple(
        tp
        for tp in range(1, ranks + 1)
        if ranks % tp == 0 and heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    )


def deal(weights: Sequence[int], replicas: int) -> list[int]:
    """Assign requests to replicas so that counts and then total weights (tokens in KV) are even.

    Returns the replica of each request. Requests go, heaviest first, to the replica with the fewest requests
    and, among those, the fewest tokens; ties go by index, so that every rank computes the same answer.
    """
    owner = [0] * len(weights)
    load = [(0, 0, replica) for replica in range(replicas)]
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        count, tokens, replica = min(load)
        owner[index] = replica
        load[replica] = (count + 1, tokens + weights[index], replica)
    return owner


def rebalance(owner: Sequence[int], weights: Sequence[int], replicas: int) -> list[int]:
    """The replica of each request after moving as few, and as light ones, as it takes to make the counts even.

    owner: the replica of each request now.  Requests go, lightest first, from a replica with the most requests (of
    those the one with the most tokens) to one with the fewest (and the fewest tokens).
    """
    owner = list(owner)
    held = [sorted((weights[i], i) for i, o in enumerate(owner) if o == replica) for replica in range(replicas)]
    load = [(len(requests), sum(weight for weight, _ in requests)) for requests in held]
    while True:
        full = max(range(replicas), key=lambda replica: (load[replica], -replica))
        free = min(range(replicas), key=lambda replica: (load[replica], replica))
        if load[full][0] - load[free][0] < 2:
            return owner
        weight, index = held[full].pop(0)
        owner[index] = free
        load[full] = (load[full][0] - 1, load[full][1] - weight)
        load[free] = (load[free][0] + 1, load[free][1] + weight)
