"""What SGLang must know of a request to sample for it: its seed, and the tokens that its penalties count."""

from __future__ import annotations

import hashlib

import torch

from pat.engine import sglang_api as sg
from pat.engine.penalties import with_history


def from_schedule_batch(original, cls, batch, vocab_size):
    """Hook around SGLang's ``SamplingBatchInfo.from_schedule_batch``."""
    info = original(cls, batch, vocab_size)
    if info.sampling_seed is None:
        info.sampling_seed = seeds(batch.reqs, info.temperatures.device)
    info.penalizer_orchestrator = with_history(info.penalizer_orchestrator, batch)
    # A greedy request (top_k = 1) has no use for a filter, which would have the whole batch sorted, nor for a
    # temperature, which would show in its log-probabilities beside sampled requests and not among greedy ones.
    sampled = [req.sampling_params for req in batch.reqs if req.sampling_params.top_k > 1]
    info.need_top_k_sampling = any(params.top_k != sg.TOP_K_ALL for params in sampled)
    info.need_top_p_sampling = any(params.top_p != 1 for params in sampled)
    info.need_min_p_sampling = any(params.min_p > 0 for params in sampled)
    info.temperatures.masked_fill_(info.top_ks.view(-1, 1) <= 1, 1.0)
    return info


def next_sample(seed: int) -> int:
    """Seed of the sample after the one with ``seed``, of the n samples of a request; 63 bits."""
    digest = hashlib.blake2b(seed.to_bytes(8, "big", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seeds(reqs: list, device: torch.device) -> torch.Tensor:
    """Seed of each request [requests], int64.

    SGLang fills the seeds in only in its deterministic mode, which torch_native refuses. A request without a seed
    draws one, which is the same on all ranks of its replica.
    """
    given = [req.sampling_params.sampling_seed for req in reqs]
    drawn = torch.randint(1 << 31, (len(reqs),)).tolist()
    chosen = [new if seed is None else seed for seed, new in zip(given, drawn, strict=True)]
    # From pinned memory, as SGLang's other parameters, so that a GPU is not waited for.
    pinned = device.type == "cuda"
    return torch.tensor(chosen, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)
