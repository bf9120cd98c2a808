"""The KV cache of unfinished requests under another layout: which heads go where, and the move itself.

A token's KV is [kv heads, head dim] a layer. Rank q of the new layout needs, for each request dealt to its
replica, its own heads of every token; some rank of the request's old replica has them. One all-to-all a layer
moves them straight between the ranks concerned, so that no more than one layer is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pat.layout import Layout


@dataclass(frozen=True)
class Move:
    """Tokens [start, end) of one request go from replica ``source`` (old) to replica ``target`` (new).

    Tokens before ``start`` are a prefix that an earlier move of the same target already brings.
    """

    source: int
    target: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


def senders(old: Layout, new: Layout, source: int, receiver: int, kv_heads: int) -> dict[int, range]:
    """{rank of replica ``source``: KV heads that ``receiver`` takes from it} (global head numbers).

    Every head that the receiver needs appears exactly once; where heads are replicated, the receiver itself or
    the first holder sends.
    """
    taken: dict[int, list[int]] = {}
    for head in new.kv_heads(receiver, kv_heads):
        holders = [r for r in old.replicas[source] if head in old.kv_heads(r, kv_heads)]
        sender = receiver if receiver in holders else holders[0]
        taken.setdefault(sender, []).append(head)
    return {sender: range(heads[0], heads[-1] + 1) for sender, heads in taken.items()}


@dataclass
class _Side:
    """What one rank sends to (or gets from) one peer: token locations in the pool, local heads."""

    locations: list[torch.Tensor]
    heads: slice

    def index(self) -> torch.Tensor:
        return torch.cat(self.locations)


class Exchange:
    """One rank's half of moving a set of requests; ``run_layer`` is called for each layer, in order, on all ranks.

    moves: the same list on every rank. old_locations / new_locations: pool locations [end - start] of each move
    on this rank, None where this rank's replica is not its source / target.
    """

    def __init__(
        self,
        old: Layout,
        new: Layout,
        rank: int,
        kv_heads: int,
        moves: Sequence[Move],
        old_locations: Sequence[torch.Tensor | None],
        new_locations: Sequence[torch.Tensor | None],
    ) -> None:
        self.world = old.ranks
        self.sends: dict[int, _Side] = {}
        self.receives: dict[int, _Side] = {}
        first_old, first_new = old.kv_heads(rank, kv_heads).start, new.kv_heads(rank, kv_heads).start
        for move, here, there in zip(moves, old_locations, new_locations, strict=True):
            if move.source == old.replica(rank):
                for receiver in new.replicas[move.target]:
                    heads = senders(old, new, move.source, receiver, kv_heads).get(rank)
                    if heads:
                        self._add(self.sends, receiver, here, heads, first_old)
            if move.target == new.replica(rank):
                for sender, heads in senders(old, new, move.source, rank, kv_heads).items():
                    self._add(self.receives, sender, there, heads, first_new)

    @staticmethod
    def _add(sides: dict[int, _Side], peer: int, locations: torch.Tensor, heads: range, first: int) -> None:
        local = slice(heads.start - first, heads.stop - first)
        side = sides.setdefault(peer, _Side([], local))
        assert side.heads == local, "a pair of ranks exchanges the same heads for every request"
        side.locations.append(locations)

    def run_layer(
        self, old_kv: Sequence[torch.Tensor], new_kv: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> int:
        """Move one layer. old_kv, new_kv: the layer's K and V as [tokens, heads of this rank, head dim] in the old
        and the new layout (they may share storage: everything is read before anything is written).

        Returns the bytes that left this rank for another.
        """
        like = old_kv[0]
        chunks, send_sizes = [], []
        for peer in range(self.world):
            side = self.sends.get(peer)
            parts = [buffer[side.index(), side.heads] for buffer in old_kv] if side else []
            chunks += [part.reshape(-1) for part in parts]
            send_sizes.append(sum(part.numel() for part in parts))
        receive_sizes = []
        for peer in range(self.world):
            side = self.receives.get(peer)
            tokens = sum(len(x) for x in side.locations) if side else 0
            heads = side.heads.stop - side.heads.start if side else 0
            receive_sizes.append(sum(tokens * heads * buffer.shape[-1] for buffer in new_kv) if side else 0)
        outgoing = torch.cat(chunks) if chunks else like.new_empty(0)
        incoming = like.new_empty(sum(receive_sizes))
        dist.all_to_all_single(incoming, outgoing, receive_sizes, send_sizes, group=group)
        offset = 0
        for peer in range(self.world):
            side = self.receives.get(peer)
            if not side:
                continue
            index = side.index()
            for buffer in new_kv:
                shape = (len(index), side.heads.stop - side.heads.start, buffer.shape[-1])
                size = shape[0] * shape[1] * shape[2]
                buffer[index, side.heads] = incoming[offset : offset + size].view(shape)
                offset += size
        own = dist.get_rank()
        return sum(n for peer, n in enumerate(send_sizes) if peer != own) * like.element_size()


class Pool:
    """SGLang's KV pool, re-typed in place: the same storage with the heads of another tp."""

    def __init__(self, pool, kv_heads: int) -> None:
        self.pool, self.kv_heads = pool, kv_heads
        self.base_k, self.base_v = list(pool.k_buffer), list(pool.v_buffer)

    @property
    def layers(self) -> int:
        return len(self.base_k)

    def layer(self, index: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer as [tokens, heads, head dim]: a prefix of the layer's storage."""
        views = []
        for base in (self.base_k[index], self.base_v[index]):
            tokens, _, dim = base.shape
            views.append(base.view(-1)[: tokens * heads * dim].view(tokens, heads, dim))
        return views[0], views[1]

    def retype(self, heads: int) -> None:
        """Let SGLang read and write ``heads`` heads a token from now on; contents are whatever is in the storage."""
        pool = self.pool
        for index in range(self.layers):
            pool.k_buffer[index], pool.v_buffer[index] = self.layer(index, heads)
        pool.head_num = heads
        pool.row_dim, pool.v_row_dim = heads * pool.head_dim, heads * pool.v_head_dim
        pool._kv_buffer_descs = pool._build_kv_buffer_descs()
        pool._init_data_ptrs_and_strides()
