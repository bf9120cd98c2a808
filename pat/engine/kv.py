"""The KV cache of unfinished requests under another layout: which heads go where, and the move itself.

A token's KV is [kv heads, head dim] a layer. Rank q of the new layout needs, for each request dealt to its
replica, its own heads of every token; some rank of the request's old replica has them. One all-to-all a layer
moves them straight between the ranks concerned, so that no more than one layer is in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    """What one rank sends to (or gets from) one peer a layer: token locations in the pool, local heads."""

    heads: slice
    locations: list[torch.Tensor]

    def close(self, head_dims: Sequence[int]) -> None:
        self.index = torch.cat(self.locations)
        self.shapes = [(len(self.index), self.heads.stop - self.heads.start, dim) for dim in head_dims]
        self.sizes = [math.prod(shape) for shape in self.shapes]


class Exchange:
    """One rank's half of moving a set of requests; ``run_layer`` is called for each layer, in order, on all ranks.

    moves: the same list on every rank. old_locations / new_locations: pool locations [end - start] of each move
    on this rank, None where this rank's replica is not its source / target. like: K and V of a layer of the pool
    [.., head dim]. Buffers for one layer are taken here, where a rank without memory for them can still say so.
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
        like: Sequence[torch.Tensor],
    ) -> None:
        self.world, self.rank = old.ranks, rank
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
        for side in (*self.sends.values(), *self.receives.values()):
            side.close([buffer.shape[-1] for buffer in like])
        self.send_sizes, self.receive_sizes = (
            [sum(sides[peer].sizes) if peer in sides else 0 for peer in range(self.world)]
            for sides in (self.sends, self.receives)
        )
        self.outgoing = like[0].new_empty(sum(self.send_sizes))
        self.incoming = like[0].new_empty(sum(self.receive_sizes))

    @staticmethod
    def _add(sides: dict[int, _Side], peer: int, locations: torch.Tensor, heads: range, first: int) -> None:
        local = slice(heads.start - first, heads.stop - first)
        side = sides.setdefault(peer, _Side(local, []))
        assert side.heads == local, "a pair of ranks exchanges the same heads for every request"
        side.locations.append(locations)

    def run_layer(
        self, old_kv: Sequence[torch.Tensor], new_kv: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> int:
        """Move one layer. old_kv, new_kv: the layer's K and V as [tokens, heads of this rank, head dim] in the old
        and the new layout (they may share storage: everything is read before anything is written).

        Returns the bytes that left this rank for another.
        """
        for peer, views in self._parts(self.sends, self.outgoing):
            side = self.sends[peer]
            for buffer, view in zip(old_kv, views, strict=True):
                torch.index_select(buffer[:, side.heads], 0, side.index, out=view)
        dist.all_to_all_single(self.incoming, self.outgoing, self.receive_sizes, self.send_sizes, group)
        for peer, views in self._parts(self.receives, self.incoming):
            side = self.receives[peer]
            for buffer, view in zip(new_kv, views, strict=True):
                buffer[side.index, side.heads] = view
        return (len(self.outgoing) - self.send_sizes[self.rank]) * self.outgoing.element_size()

    @staticmethod
    def _parts(sides: dict[int, _Side], flat: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """(peer, its K and V in ``flat``, each [tokens, heads, head dim]), in the order of the peers."""
        start = 0
        for peer in sorted(sides):
            views = []
            for shape, size in zip(sides[peer].shapes, sides[peer].sizes, strict=True):
                views.append(flat[start : start + size].view(shape))
                start += size
            yield peer, views


class Pool:
    """SGLang's KV pool, re-typed in place: the same storage with the heads of another tp.

    With fewer heads a token takes less of it, so the pool holds more tokens at a wide size. Raises ValueError for
    a pool whose storage is not [tokens, heads, head dim] a layer, or not there yet.

    base_tokens: what is used of it at the base size, at most what it has.
    """

    def __init__(self, pool, allocator, kv_heads: int, base_tokens: int) -> None:
        if pool.kv_cache_layout != "nhd" or pool.post_capture_active:
            raise ValueError(
                f"SGLang's KV pool has the layout {pool.kv_cache_layout!r} (post-capture: {pool.post_capture_active}); "
                "PAT re-types pools of layout 'nhd': unset SGLANG_USE_HND_KVCACHE and the like"
            )
        self.pool, self.allocator, self.kv_heads = pool, allocator, kv_heads
        self.padding = pool.k_buffer[0].shape[0] - allocator.size
        rows = base_tokens + self.padding
        self.base_k, self.base_v = ([layer[:rows] for layer in layers] for layers in (pool.k_buffer, pool.v_buffer))

    @property
    def layers(self) -> int:
        return len(self.base_k)

    def tokens(self, heads: int) -> int:
        """Tokens that the pool holds with ``heads`` KV heads a token, besides the one that padding writes to."""
        return self._rows(self.base_k[0], heads) - self.padding

    @staticmethod
    def _rows(base: torch.Tensor, heads: int) -> int:
        return base.shape[0] * base.shape[1] // heads

    def layer(self, index: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer as [tokens, heads, head dim], of the layer's storage."""
        views = []
        for base in (self.base_k[index], self.base_v[index]):
            rows, dim = self._rows(base, heads), base.shape[2]
            views.append(base.view(-1)[: rows * heads * dim].view(rows, heads, dim))
        return views[0], views[1]

    def resize(self, heads: int) -> int:
        """Let the allocator, which must be empty, hand out what the storage has at ``heads``; returns the tokens."""
        self.allocator.size = self.tokens(heads)
        self.allocator.clear()
        return self.allocator.size

    def retype(self, heads: int) -> None:
        """Let SGLang read and write ``heads`` heads a token from now on; contents are whatever is in the storage."""
        pool = self.pool
        for index in range(self.layers):
            pool.k_buffer[index], pool.v_buffer[index] = self.layer(index, heads)
        pool.size = self.tokens(heads)
        pool.head_num = heads
        pool.row_dim, pool.v_row_dim = heads * pool.head_dim, heads * pool.v_head_dim
        pool._kv_buffer_descs = pool._build_kv_buffer_descs()
        pool._init_data_ptrs_and_strides()
