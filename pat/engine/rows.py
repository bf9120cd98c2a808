"""Rows of fused parameters, put in another order in place when the size changes.

A fused parameter (Q, K and V; gate and up, of an expert too) is not one view of a larger shard: its parts lie apart.
Before a size is used, the rows that a rank owns there are brought together: the first part stays where it is, the
others follow it, and the rows that they displace go where they came from. So each size has one contiguous view at
one address for ever, for SGLang's own kernels and captured graphs, and the base order comes back bit by bit.
"""

from __future__ import annotations

from functools import cache

import torch

Parts = tuple[tuple[int, int], ...]  # (first row, rows) of each part, in the order in which a kernel wants them
CHUNK_BYTES = 8 << 20  # of memory that a change of order takes


def order(rows: int, parts: Parts) -> torch.Tensor:
    """The row of the base order that is at each place, [rows] int64, when ``parts`` lie in one piece.

    They begin where their first part does at the base. Without parts the base order itself.
    """
    places = torch.arange(rows)
    if parts:
        own = torch.cat([places[start : start + count] for start, count in parts])
        here, mine = torch.zeros(2, rows, dtype=torch.bool)
        here[parts[0][0] : parts[0][0] + len(own)] = True
        mine[own] = True
        arranged = places.clone()
        arranged[here] = own
        arranged[mine & ~here] = places[here & ~mine]
        places = arranged
    return places


@cache
def moves(rows: int, old: Parts, new: Parts, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(places whose row changes, places where their new rows are now) from the order of ``old`` to that of ``new``."""
    before, after = order(rows, old), order(rows, new)
    now = torch.empty_like(before)
    now[before] = torch.arange(rows)
    places = (before != after).nonzero().flatten()
    return places.to(device), now[after[places]].to(device)


class FusedRows:
    """All fused parameters of one rank's resident shard. tp: the size whose order their rows are in."""

    def __init__(self, base: int) -> None:
        self.base = self.tp = base
        self._weights: dict[int, tuple[torch.Tensor, dict[int, Parts]]] = {}  # by address: [blocks, rows, in], parts

    def view(self, tp: int, weight: torch.Tensor, parts: Parts) -> torch.Tensor:
        """What ``parts`` of ``weight`` are once ``arrange(tp)`` has run: a view at a constant address.

        weight: [rows], [rows, in] or [experts, rows, in], of the base size; its rows are in the base order.
        """
        dim = max(0, weight.dim() - 2)
        blocks = weight.view(-1, weight.shape[dim], weight.shape[-1] if weight.dim() > 1 else 1)
        self._weights.setdefault(weight.data_ptr(), (blocks, {}))[1][tp] = parts
        return weight.narrow(dim, parts[0][0], sum(count for _, count in parts))

    def arrange(self, tp: int) -> None:
        """Put all rows in the order of ``tp``."""
        for weight, parts in self._weights.values():
            places, sources = moves(weight.shape[1], parts.get(self.tp, ()), parts.get(tp, ()), weight.device)
            _permute(weight, places, sources)
        self.tp = tp


def _permute(weight: torch.Tensor, places: torch.Tensor, sources: torch.Tensor) -> None:
    """Copy the rows at ``sources`` to ``places``, the same set of rows, of each block of [blocks, rows, in]."""
    if not len(places):
        return
    numbers = max(1, CHUNK_BYTES // (len(places) * weight.element_size()))  # that a chunk may have of each row
    blocks = max(1, numbers // weight.shape[2])
    for some in weight.split(blocks):
        for columns in some.split(min(numbers, weight.shape[2]), dim=2):
            columns.index_copy_(1, places, columns.index_select(1, sources))
