"""All-reduce and all-gather of a tensor-parallel group through shared memory.

Over gloo a small all-reduce takes about a millisecond on busy cores, more than the layer that it ends; a mailbox
in /dev/shm with a spinning reader takes microseconds. Writes become visible in program order on x86-64, which
the mailbox relies on; elsewhere SGLang's own path (gloo) is used.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from pat.engine.shared import allocate

SLOT_BYTES = 4 << 20  # larger tensors go through gloo: their cost is bandwidth, not latency
HEADER_BYTES = 4096
SPINS_BEFORE_YIELD = 2000


def mailbox_bytes(world: int) -> int:
    """What the mailbox of a group of ``world`` ranks takes."""
    return HEADER_BYTES + 2 * world * SLOT_BYTES


class Mailbox:
    """One slot a rank, two generations: while one is read, the next may already be written.

    A rank can be at most one exchange ahead of the slowest, since it waits for all in each exchange; hence two
    generations are enough.
    """

    def __init__(self, path: Path, rank: int, world: int, timeout_s: float) -> None:
        self.path, self.rank, self.world, self.timeout_s = path, rank, world, timeout_s
        size = mailbox_bytes(world)
        if rank == 0:
            temporary = path.with_name(f"{path.name}.tmp")  # not with_suffix: the leader's number is one
            allocate(temporary, size)
            temporary.rename(path)
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank}: {path} was not created within {timeout_s:.0f} s")
            time.sleep(0.01)
        memory = np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,))
        lines = memory[:HEADER_BYTES].view(np.int64).reshape(-1, 8)[:world]  # one cache line a rank
        self.flags, self.sizes = lines[:, 0], lines[:, 1:3]
        self.slots = torch.from_numpy(memory[HEADER_BYTES:]).view(2, world, SLOT_BYTES)
        self.sequence = 0
        self.peers = [peer for peer in range(world) if peer != rank]

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Give every rank's ``tensor`` to every rank: views into the mailbox, valid until this rank's next exchange.

        Raises TimeoutError naming the rank that did not answer.
        """
        tensor = tensor.contiguous()
        nbytes = tensor.numel() * tensor.element_size()
        self.sequence += 1
        slots = self.slots[self.sequence & 1]
        slots[self.rank, :nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self.sizes[self.rank, self.sequence & 1] = nbytes
        self.flags[self.rank] = self.sequence
        for peer in self.peers:
            self._wait(peer)
            if self.sizes[peer, self.sequence & 1] != nbytes:
                raise RuntimeError(
                    f"tensor-parallel rank {peer} exchanges {self.sizes[peer, self.sequence & 1]} bytes and rank "
                    f"{self.rank} {nbytes}: they are not in the same step"
                )
        return [slots[i, :nbytes].view(tensor.dtype).view(tensor.shape) for i in range(self.world)]

    def _wait(self, peer: int) -> None:
        spins, deadline = 0, None
        while self.flags[peer] < self.sequence:
            spins += 1
            if spins > SPINS_BEFORE_YIELD:
                os.sched_yield()
                if spins % 10_000 == 0:
                    deadline = deadline or time.monotonic() + self.timeout_s
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"tensor-parallel rank {peer} did not answer within {self.timeout_s:.0f} s")


def supported() -> bool:
    return platform.machine() == "x86_64"


class SharedMemoryCollectives:
    """Hooks for GroupCoordinator.all_reduce / all_gather; one mailbox a group."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self.directory, self.timeout_s = directory, timeout_s
        self.boxes: dict[str, Mailbox] = {}

    def connect(self, groups: Iterable) -> None:
        """Make the mailboxes of ``groups`` now, on all of their ranks: without room for one the start fails."""
        for group in groups:
            if group.world_size > 1:
                self._box(group)

    def _box(self, group) -> Mailbox:
        name = f"{group.unique_name.replace(':', '_')}.{group.ranks[0]}"
        if name not in self.boxes:
            self.boxes[name] = Mailbox(
                self.directory / f"mailbox.{name}", group.rank_in_group, group.world_size, self.timeout_s
            )
        return self.boxes[name]

    def _fits(self, group, tensor: torch.Tensor) -> bool:
        return group.world_size > 1 and tensor.is_cpu and tensor.numel() * tensor.element_size() <= SLOT_BYTES

    def all_reduce(self, original, group, tensor: torch.Tensor) -> torch.Tensor:
        if not self._fits(group, tensor):
            return original(group, tensor)
        parts = self._box(group).exchange(tensor)
        # Added in rank order on every rank: all ranks get bit-identical sums.
        total = torch.add(parts[0], parts[1], out=tensor)
        for part in parts[2:]:
            total += part
        return total

    def all_gather(self, original, group, tensor: torch.Tensor, dim: int = -1, *args, **kwargs):
        if args or kwargs or not self._fits(group, tensor):
            return original(group, tensor, dim, *args, **kwargs)
        return torch.cat(self._box(group).exchange(tensor), dim)
