"""Which batch sizes each tensor-parallel size captures decode graphs for; pure."""

from __future__ import annotations

from collections.abc import Sequence


def batches(base: Sequence[int], factor: int, requests: int, rows: float) -> list[int]:
    """Batch sizes to capture at a size ``factor`` times the base, where a replica holds as many times the requests.

    base: those of the base size. requests: as many a replica runs. rows: largest batch that the memory budget holds.
    Up to the base's largest they are the base's; from there each is at most an eighth above the one before: a replay
    wastes little, and each doubling takes eight graphs.
    """
    sizes = sorted(base)
    last = int(min(sizes[-1] * factor, requests, rows))
    while sizes[-1] < last:
        largest = sizes[-1]
        step = max(1, (1 << (largest.bit_length() - 1)) // 8)
        sizes.append(min(largest + step, last))
    return sizes
