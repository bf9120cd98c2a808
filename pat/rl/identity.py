"""Who a request is, independent of when and where it runs: the n-th sample of a prompt in an iteration (pure).

verl's request ids are random. A seed that depends on (run seed, iteration, prompt, n-th sample) alone makes an arm
with switches and one without sample the same tokens from the same weights.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence


def _digest(prompt_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=16).digest()


class Numbering:
    """Numbers the requests of one iteration, ``samples`` of each prompt, in the order in which prompts arrive."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._groups: dict[tuple[bytes, int], int] = {}
        self._seen: Counter[bytes] = Counter()

    def next(self, prompt_ids: Sequence[int]) -> tuple[int, int]:
        """(k, n) of a request that has just arrived: it is the k-th of the iteration, and its prompt's n-th."""
        prompt = _digest(prompt_ids)
        sample = self._seen[prompt]
        self._seen[prompt] += 1
        again, position = divmod(sample, self._samples)  # a batch may hold a prompt twice
        group = self._groups.setdefault((prompt, again), len(self._groups))
        return group * self._samples + position, sample


SERVERS_APART = 1 << 20  # more samples than a prompt has on one server


class Identities:
    """Seeds and replayed lengths of the requests of one iteration on one server.

    Several servers share an iteration's prompts. Where nobody numbers the requests of all of them, each numbers its
    own, and ``replica`` keeps their samples of a prompt apart.
    """

    def __init__(
        self, run_seed: int, iteration: int, lengths: Sequence[int] | None, samples: int, replica: int = 0
    ) -> None:
        self.run_seed, self.iteration, self.lengths, self.replica = run_seed, iteration, lengths, replica
        self._numbering = Numbering(samples)

    def next(self, prompt_ids: Sequence[int], number: tuple[int, int] | None = None) -> tuple[int, int | None]:
        """(sampling seed, replayed response length in tokens or None) of a request that has just arrived.

        number: its ``Numbering.next`` among the requests of all servers, if it has one (``pat.rl.router``).
        The k-th request of the iteration replays the k-th length, cycled.
        """
        if number is None:
            request, sample = self._numbering.next(prompt_ids)
            number = request, sample + self.replica * SERVERS_APART
        request, sample = number
        key = f"{self.run_seed}/{self.iteration}/{sample}/".encode() + _digest(prompt_ids)
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1  # 31 bits
        length = self.lengths[request % len(self.lengths)] if self.lengths else None
        return seed, length
