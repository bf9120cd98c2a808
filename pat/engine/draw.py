"""How a request's next token is drawn: by its own row, seed and parameters, whoever else is in the batch.

SGLang's seeded sampling gives noise to tokens by id, or by rank as soon as anyone in the batch filters; and it does not
have min_p. Here the noise of a token is a function of (seed, position, token id), always, and a filter takes tokens out
of the draw without changing the noise of the others. So a request's token does not change with its neighbours, and two
tokens that change ranks because their logits differ by rounding do not change places.

The draw is Gumbel's: the token with the largest log p - log(-log u), u uniform, is one of distribution p. It is taken
as the least p / log u, which needs one logarithm a token, in float32.

All of it runs as single torch operations that do not wait for the device. Nothing is compiled by torch; Triton compiles
the hash for a few kinds of batch sizes, see ``warm_up``.
"""

from __future__ import annotations

import torch

from pat.engine import sglang_api as sg
from pat.seam import SeamError

# A hash of 32 bits becomes the middle of one of 2^32 cells. Not all of the last one, which float32 would round to 1.
CELL = 2.0**-32
WIDTH = CELL * (1 - 2.0**-24)


def log_uniform(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """log u [requests, vocab], float32, below 0; u is a hash of (seed, position, token id), uniform in (0, 1).

    seeds: int64 [requests]. positions: int64 [requests], of the last token of each context. The same noise as in
    SGLang's ``multinomial_with_seed``.
    """
    hashed = sg.murmur_hash32(seeds.to(torch.uint64), positions, torch.arange(vocab, device=seeds.device))
    # A token that wins has u near 1, of which float32 keeps little: its complement is exact there.
    complement = hashed.view(torch.int32).bitwise_not_().view(torch.uint32)
    return torch.rsub(complement, -CELL / 2, alpha=WIDTH).log1p_()


def candidates(probs: torch.Tensor, info, best: torch.Tensor | None = None) -> torch.Tensor | None:
    """Which tokens each request may draw: bool [requests, vocab], or None for all.

    probs: [requests, vocab], after temperature. info: SGLang's SamplingBatchInfo, whose flags say what any request asks
    for. best: [requests], the token of the requests with top_k = 1; None if there are none.

    As in SGLang, each filter looks at the unfiltered probabilities: top_k keeps the k most likely tokens (of equal ones
    the first), top_p those before which there is no more than top_p, min_p those of at least min_p times the largest. A
    request that does not filter keeps all of them, whatever rounding does to a sum of probabilities.
    """
    keep = None
    if info.need_top_k_sampling or info.need_top_p_sampling:
        ranked, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
        top_ps, ranks = info.top_ps.view(-1, 1), torch.arange(probs.shape[-1], device=probs.device)
        # In float64, since the order in which float32 is summed depends on the number of rows on a GPU.
        before = ranked.cumsum(-1, dtype=torch.float64).sub_(ranked)
        inside = (before <= top_ps).logical_or_(top_ps >= 1).logical_and_(ranks < info.top_ks.view(-1, 1))
        keep = torch.empty_like(inside).scatter_(-1, ids, inside)
    if info.need_min_p_sampling:
        likely = probs >= probs.amax(-1, keepdim=True) * info.min_ps.view(-1, 1)
        keep = likely if keep is None else keep.logical_and_(likely)
    if best is not None:
        is_best = torch.arange(probs.shape[-1], device=probs.device) == best.view(-1, 1)
        sampled = info.top_ks.view(-1, 1) > 1
        keep = is_best.logical_or_(sampled) if keep is None else torch.where(sampled, keep, is_best)
    return keep


def draw(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None = None
) -> torch.Tensor:
    """One token id of each request [requests], int32, of the distribution ``probs`` among those of ``keep``."""
    race = torch.div(probs, log_uniform(seeds, positions, probs.shape[-1]))  # <= 0
    if keep is not None:
        race.masked_fill_(keep.logical_not(), 1.0)
    return race.argmin(-1).to(torch.int32)


def sampler_class() -> type:
    """SGLang's sampler, drawing as above. Log-probabilities, processors and the rest are SGLang's."""

    class PatSampler(sg.Sampler):
        best: torch.Tensor | None = None  # of the batch at hand: its greedy requests' tokens, if there are others

        def _preprocess_logits(self, logits, sampling_info):
            logits = super()._preprocess_logits(logits, sampling_info)
            mixed = sampling_info.is_any_greedy and not sampling_info.is_all_greedy
            # As in a batch of greedy requests only; two logits that differ can have one probability.
            self.best = logits.argmax(-1) if mixed else None
            return logits

        def _sample_from_probs(self, probs, sampling_info, positions, simple_sampling_case):
            keep = candidates(probs, sampling_info, self.best)
            tokens = draw(probs, sampling_info.sampling_seed, positions, keep)
            rows = sampling_info.sampling_mask_batch_indices
            if rows is None:
                return tokens, None
            weights = probs[rows] if keep is None else probs[rows].masked_fill_(~keep[rows], 0.0)
            return tokens, sg.SamplingMaskCapture(weights, None, None, rows)

    return PatSampler


def warm_up(sampler, device: torch.device | str, vocab: int) -> None:
    """Load all that the draw runs: Triton tells one row, a multiple of 16 and other numbers apart in the hash.

    Raises SeamError if ``sampler``, which will draw, is not the one above: SGLang only logs a hook that fails.
    """
    if not hasattr(sampler, "best"):
        raise SeamError(
            f"PAT's sampler is not in place of {type(sampler).__name__}: see the log for a hook that failed"
        )
    for requests in (1, 2, 16):
        zeros = torch.zeros(requests, dtype=torch.int64, device=device)
        draw(torch.ones((requests, vocab), device=device), zeros, zeros)


def scale(logits: torch.Tensor, scaling_penalties: torch.Tensor) -> None:
    """SGLang's ``apply_scaling_penalties`` (repetition_penalty), which torch would compile at its first use."""
    logits.copy_(torch.where(logits < 0, logits * scaling_penalties, logits / scaling_penalties))
