"""The KV cache of unfinished requests under another layout: which heads go where, and the move itself.

A token's KV is [kv heads, head dim] a layer. Rank q of the new layout needs, for each request dealt to its
replica, its own heads of every token; some rank of the request's old replica has them. All-to-alls layer by layer
move them straight between the ranks concerned, in chunks, so that little memory is taken beside the pool.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pat.layout import Layout

LIMIT_BYTES = 256 << 20  # most that a rank receives at a time


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


@dataclass(frozen=True)
class _Pair:
    """What one rank sends another: ``tokens`` tokens, of each the heads ``out`` at the sender, ``into`` there."""

    tokens: int
    out: slice
    into: slice

    @property
    def heads(self) -> int:
        return self.out.stop - self.out.start

    def chunk(self, number: int, chunks: int) -> slice:
        """The tokens of one of ``chunks`` even chunks."""
        return slice(self.tokens * number // chunks, self.tokens * (number + 1) // chunks)


class Exchange:
    """One rank's half of moving a set of requests; ``run_layer`` is called for each layer, in order, on all ranks.

    moves: the same list on every rank. like: K and V of a layer of the pool [.., head dim]. limit_bytes: most that is
    received at a time. Buffers are taken here, where nothing has been touched and a rank without memory for them can
    still say so: one K or V of the layer to send, which must be read before the new layout, in the same memory, is
    written; and at most ``limit_bytes`` to receive. Every rank knows all moves, and so how many chunks each makes.
    """

    def __init__(
        self,
        old: Layout,
        new: Layout,
        rank: int,
        kv_heads: int,
        moves: Sequence[Move],
        like: Sequence[torch.Tensor],
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.old, self.new, self.rank, self.moves = old, new, rank, moves
        self.dims = [buffer.shape[-1] for buffer in like]
        between = Counter()
        for move in moves:
            between[move.source, move.target] += move.tokens
        self.pairs: dict[tuple[int, int], _Pair] = {}  # by (sender, receiver)
        for (source, target), tokens in between.items():
            for receiver in new.replicas[target]:
                for sender, heads in senders(old, new, source, receiver, kv_heads).items():
                    first_out, first_in = old.kv_heads(sender, kv_heads).start, new.kv_heads(receiver, kv_heads).start
                    out, into = (slice(heads.start - first, heads.stop - first) for first in (first_out, first_in))
                    self.pairs[sender, receiver] = _Pair(tokens, out, into)
        limit, both = limit_bytes // like[0].element_size(), tuple(range(len(self.dims)))
        together = max(self._most(both, 1, side) for side in (0, 1)) <= limit
        self.passes = [
            (kinds, self._chunks(kinds, limit)) for kinds in ([both] if together else [(kind,) for kind in both])
        ]
        out, into = (
            max(self._numbers(kinds, count, side, rank) for kinds, count in sized)
            for side, sized in ((0, [(kinds, 1) for kinds, _ in self.passes]), (1, self.passes))
        )
        self.outgoing, self.incoming = like[0].new_empty(out), like[0].new_empty(into)

    def _numbers(self, kinds: tuple[int, ...], chunks: int, side: int, rank: int) -> int:
        """Most numbers that a chunk of ``rank`` has as sender (side 0) or receiver (side 1)."""
        width = sum(self.dims[kind] for kind in kinds)
        ours = (pair for ranks, pair in self.pairs.items() if ranks[side] == rank)
        return sum(-(-pair.tokens // chunks) * pair.heads * width for pair in ours)

    def _most(self, kinds: tuple[int, ...], chunks: int, side: int) -> int:
        return max(self._numbers(kinds, chunks, side, rank) for rank in range(self.old.ranks))

    def _chunks(self, kinds: tuple[int, ...], limit: int) -> int:
        """The fewest chunks of which no rank receives more than ``limit`` numbers; one token a peer is the least."""
        longest = max((pair.tokens for pair in self.pairs.values()), default=1)
        chunks = max(1, -(-self._most(kinds, 1, 1) // max(limit, 1)))
        while chunks < longest and self._most(kinds, chunks, 1) > limit:
            chunks += 1
        return min(chunks, longest)

    def locate(
        self, old_locations: Sequence[torch.Tensor | None], new_locations: Sequence[torch.Tensor | None]
    ) -> None:
        """Pool locations [end - start] of each move; None where this rank's replica is not its source / target."""
        self.sends = self._indices(0, self.old.replica(self.rank), old_locations)
        self.receives = self._indices(1, self.new.replica(self.rank), new_locations)

    def _indices(self, side: int, ours: int, locations: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """{peer: locations of the tokens that go to it (side 0) or come from it (side 1)}, in the order of moves."""
        by_replica: dict[int, list[torch.Tensor]] = {}
        for move, where in zip(self.moves, locations, strict=True):
            replicas = (move.source, move.target)
            if replicas[side] == ours:
                by_replica.setdefault(replicas[1 - side], []).append(where)
        index = {replica: torch.cat(parts) for replica, parts in by_replica.items()}
        layout = (self.new, self.old)[side]
        peers = sorted(ranks[1 - side] for ranks in self.pairs if ranks[side] == self.rank)
        return {peer: index[layout.replica(peer)] for peer in peers}

    def run_layer(
        self, old_kv: Sequence[torch.Tensor], new_kv: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> int:
        """Move one layer. old_kv, new_kv: the layer's K and V as [tokens, heads of this rank, head dim] in the old
        and the new layout (they may share storage: of K, and of V, all is read before anything is written).

        Returns the bytes that left this rank for another.
        """
        left = 0
        for kinds, chunks in self.passes:
            sizes, start = [], 0
            for number in range(chunks):
                size, parts = self._parts(self.outgoing[start:], kinds, number, chunks, 0)
                for peer, kind, view in parts:
                    pair = self.pairs[self.rank, peer]
                    where = self.sends[peer][pair.chunk(number, chunks)]
                    torch.index_select(old_kv[kind][:, pair.out], 0, where, out=view)
                sizes.append((start, size))
                start += sum(size)
            for number, (start, send) in enumerate(sizes):
                receive, parts = self._parts(self.incoming, kinds, number, chunks, 1)
                outgoing, incoming = self.outgoing[start : start + sum(send)], self.incoming[: sum(receive)]
                dist.all_to_all_single(incoming, outgoing, receive, send, group)
                for peer, kind, view in parts:
                    pair = self.pairs[peer, self.rank]
                    new_kv[kind][self.receives[peer][pair.chunk(number, chunks)], pair.into] = view
                left += len(outgoing) - send[self.rank]
        return left * self.outgoing.element_size()

    def _parts(
        self, flat: torch.Tensor, kinds: tuple[int, ...], number: int, chunks: int, side: int
    ) -> tuple[list[int], list[tuple[int, int, torch.Tensor]]]:
        """Numbers a rank in a chunk, and (peer, kind, its part of ``flat`` as [tokens, heads, head dim])."""
        sizes, parts, start = [0] * self.old.ranks, [], 0
        for peer in (self.sends, self.receives)[side]:
            pair = self.pairs[(self.rank, peer) if side == 0 else (peer, self.rank)]
            piece = pair.chunk(number, chunks)
            for kind in kinds:
                shape = (piece.stop - piece.start, pair.heads, self.dims[kind])
                count = math.prod(shape)
                parts.append((peer, kind, flat[start : start + count].view(shape)))
                sizes[peer] += count
                start += count
        return sizes, parts


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
