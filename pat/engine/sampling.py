"""What SGLang must know of a request to sample for it: its seed, and the tokens that its penalties count."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from pat.engine import sglang_api as sg


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


@dataclass(eq=False)
class _Batch:
    """As much of a ScheduleBatch as SGLang's penalties look at."""

    reqs: list
    device: torch.device


def with_history(orchestrator, batch):
    """SGLang's penalties of ``batch`` (an orchestrator), having counted the tokens generated so far.

    SGLang starts to count anew when a request is retracted. A batch that goes on with a decode step counts the
    newest token in that step.
    """
    newest = 1 if batch.forward_mode.is_prebuilt() else 0
    history = [req.output_ids[: len(req.output_ids) - newest] for req in batch.reqs]
    if not orchestrator.is_required or not any(history):
        return orchestrator
    prepared = [kind for kind, penalizer in orchestrator.penalizers.items() if penalizer.is_prepared()]
    batches: list[_Batch] = []  # kept: only weak references to them are held

    def fresh(number: int):
        batches.append(_Batch([batch.reqs[number]], orchestrator.device))
        one = type(orchestrator)(orchestrator.vocab_size, batches[-1], set(orchestrator.penalizers))
        for kind in prepared:
            one.penalizers[kind].prepare()
        one.is_required = True  # else two requests without penalties would not be merged
        return one

    # SGLang counts one token of every request of a batch at once. The order of the tokens does not matter: the
    # longest history begins, and each other request joins when as many tokens are left as it has.
    lengths = [len(tokens) for tokens in history]
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    total, joined = fresh(order[0]), 1
    for left in range(lengths[order[0]], 0, -1):
        while joined < len(order) and lengths[order[joined]] >= left:
            total.merge(fresh(order[joined]))
            joined += 1
        tokens = [history[number][-left] for number in order[:joined]]
        total.cumulate_output_tokens(torch.tensor(tokens, device=orchestrator.device))
    for number in order[joined:]:
        total.merge(fresh(number))
    total.batch = batch
    total.filter(torch.tensor([order.index(number) for number in range(len(order))], device=orchestrator.device))
    return total
