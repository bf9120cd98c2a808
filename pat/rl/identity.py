"""Who a request is, independent of when and where it runs: the n-th sample of a prompt in an iteration (pure).

verl's request ids are random. A seed that depends on (run seed, iteration, prompt, n-th sample) alone makes an arm
with switches and one without sample the same tokens from the same weights.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence


class Identities:
    """Numbers the requests of one iteration in their order of arrival."""

    def __init__(self, run_seed: int, iteration: int, lengths: Sequence[int] | None, samples: int) -> None:
        self.run_seed, self.iteration, self.lengths, self.samples = run_seed, iteration, lengths, samples
        self._prompts: dict[bytes, int] = {}
        self._seen: Counter[bytes] = Counter()

    def next(self, prompt_ids: Sequence[int]) -> tuple[int, int | None]:
        """(sampling seed, replayed response length in tokens or None) of a request that has just arrived.

        The k-th request (k = prompt number x samples + sample number) replays the k-th length, cycled.
        """
        prompt = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=16).digest()
        number = self._prompts.setdefault(prompt, len(self._prompts))
        sample = self._seen[prompt]
        self._seen[prompt] += 1
        key = f"{self.run_seed}/{self.iteration}/{sample}/".encode() + prompt
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1  # 31 bits
        length = self.lengths[(number * self.samples + sample) % len(self.lengths)] if self.lengths else None
        return seed, length
