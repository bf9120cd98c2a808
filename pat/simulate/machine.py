"""What a simulated stage runs on, and what it generates."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pat.layout import Layout
from pat.predictor import Predictor


@dataclass(frozen=True)
class Machine:
    """One node: `ranks` ranks that run at any of `tp_sizes`, beginning at the smallest.

    predictor: how long steps and switches really take here; a policy may believe in another one.
    kv_tokens: KV capacity of a rank at the smallest size, tokens; a replica of a wider size holds as many times more
    as it has more ranks.  prefill_tokens: most new tokens of one prefill step (SGLang's chunked_prefill_size).
    ValueError when a size does not divide the ranks.
    """

    predictor: Predictor
    ranks: int
    tp_sizes: tuple[int, ...]
    kv_tokens: int
    prefill_tokens: int = 8192

    def __post_init__(self) -> None:
        for tp in self.tp_sizes:
            Layout(self.ranks, tp)

    @property
    def base(self) -> int:
        return min(self.tp_sizes)

    def capacity(self, tp: int) -> int:
        """KV tokens of a replica of `tp` ranks."""
        return self.kv_tokens * tp // self.base

    def prefill_s(self, tp: int, requests: np.ndarray, tokens: np.ndarray, prefix: np.ndarray) -> np.ndarray:
        """Seconds to prefill `requests` of `tokens` new ones in all, in as many equal steps as it takes.

        prefix: tokens of them that are in the cache.
        """
        steps = np.maximum(np.ceil(tokens / self.prefill_tokens), 1.0)
        each = np.maximum(requests / steps, 1.0)
        return steps * self.predictor.prefill.seconds(tp, each, tokens / steps, prefix / steps)

    def switch_s(self, tp_from: int, tp_to: int, requests: int, kv_tokens: int, mode: str | None) -> tuple[float, str]:
        """Seconds of a switch and how its KV follows: by `mode`, or the cheaper way where it is None.

        ValueError when the predictor knows no such switch.
        """
        switch = self.predictor.switch
        modes = (mode,) if mode else switch.modes(tp_from, tp_to) or ("migrate",)
        return min((float(switch.seconds(tp_from, tp_to, requests, kv_tokens, each)), each) for each in modes)


@dataclass(frozen=True)
class Requests:
    """The requests of a stage, in the order in which they arrive, all at once: tokens of each.

    cap: most new tokens of a request; one of `cap` tokens was cut off.  group: requests of equal numbers have the
    same prompt, found in the cache of a replica that has prefilled it.  ValueError for lengths outside 1..cap.
    """

    prompt: np.ndarray
    response: np.ndarray
    cap: int
    group: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.prompt.shape != self.response.shape or self.prompt.ndim != 1 or not len(self.prompt):
            raise ValueError(f"{self.prompt.shape} prompts but {self.response.shape} responses: one of each is needed")
        if self.response.min() < 1 or self.response.max() > self.cap or self.prompt.min() < 1:
            low, high = self.response.min(), self.response.max()
            raise ValueError(f"responses of {low} to {high} tokens: 1 to {self.cap} are allowed, and prompts from 1 on")

    @classmethod
    def of(
        cls, response: Sequence[int], prompt: Sequence[int] | int, cap: int | None = None, samples: int = 1
    ) -> "Requests":
        """From lists; `prompt` may be one number for all, `cap` is the longest response if left out.

        samples: so many requests in a row have the same prompt.
        """
        responses = np.asarray(response, dtype=np.int64)
        prompts = np.broadcast_to(np.asarray(prompt, dtype=np.int64), responses.shape).copy()
        group = np.arange(len(responses)) // samples if samples > 1 else None
        return cls(prompts, responses, int(cap if cap is not None else responses.max()), group)

    def __len__(self) -> int:
        return len(self.response)

    @property
    def tokens(self) -> int:
        """Tokens that are generated."""
        return int(self.response.sum())

    def of_node(self, node: int, nodes: int) -> "Requests":
        """Those of one node: they are dealt in turn."""
        group = None if self.group is None else self.group[node::nodes]
        return Requests(self.prompt[node::nodes], self.response[node::nodes], self.cap, group)
