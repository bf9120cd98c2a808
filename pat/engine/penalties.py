"""SGLang's penalties, of each request's own tokens and of all of them, whatever the scheduler knows when.

With the overlap scheduler SGLang counts a token when the next one has been drawn already, the prompt's last token in
place of the first, and one twice where a prefill step comes between: answers depend on batch mates. Here the tokens
that are known are counted before a step, and the newest within it, where it is on the device. A request is penalised
as SGLang does it without overlap, in every schedule and layout.
"""

from __future__ import annotations

from collections import defaultdict
from copy import copy

import torch

from pat.engine import sglang_api as sg


def count_known(batch) -> None:
    """In place of ``ScheduleBatch.cumulate_penalty_output_tokens``, before a decode step of ``batch``.

    With overlap the newest token is not counted: ``sample`` does it.
    """
    newest = 0 if batch.enable_overlap else 1
    prompts = [len(req.origin_input_ids) for req in batch.reqs]
    ends = [int(length) - prompt + newest for length, prompt in zip(batch.seq_lens_cpu, prompts, strict=True)]
    _count(batch.sampling_info.penalizer_orchestrator, batch.reqs, ends)


def with_history(orchestrator, batch):
    """SGLang's penalties of ``batch`` (an orchestrator), having counted the tokens generated so far.

    SGLang starts to count anew when a request is retracted. A batch that goes on with a decode step counts the
    newest token in that step.
    """
    newest = 1 if batch.forward_mode.is_prebuilt() else 0
    for req in batch.reqs:
        req.pat_penalised = 0
    _count(orchestrator, batch.reqs, [len(req.output_ids) - newest for req in batch.reqs])
    return orchestrator


def copy_for_forward(original, info):
    """Hook around ``SamplingBatchInfo.copy_for_forward``: penalties to which ``sample`` adds the newest token.

    The scheduler changes its own while the step runs. SGLang would add up here what has been counted, for good.
    """
    counted, info.penalizer_orchestrator = info.penalizer_orchestrator, _NONE
    try:
        forward = original(info)
    finally:
        info.penalizer_orchestrator = counted
    forward.penalizer_orchestrator = _twin(counted) if counted.is_required else None
    return forward


def sample(original, runner, logits_output, forward_batch):
    """Hook around ``ModelRunner.sample``: what a decode step reads are the newest tokens [requests]."""
    penalties = forward_batch.sampling_info.penalizer_orchestrator
    if isinstance(penalties, _Twin) and forward_batch.forward_mode.is_decode():
        penalties.cumulate_output_tokens(forward_batch.input_ids)
    return original(runner, logits_output, forward_batch)


class _None:
    """No penalties, as far as SGLang looks."""

    is_required = False


_NONE = _None()


class _Twin:
    """Penalties of one step: SGLang's penalizers, whose counts are this step's own."""

    is_required = True

    def __init__(self, penalizers: list) -> None:
        self.penalizers = penalizers

    def cumulate_output_tokens(self, tokens: torch.Tensor) -> None:
        for penalizer in self.penalizers:
            penalizer.cumulate_output_tokens(tokens)

    def apply(self, logits: torch.Tensor) -> None:
        for penalizer in self.penalizers:
            penalizer.apply(logits)


def _twin(orchestrator) -> _Twin:
    twins = []
    for penalizer in orchestrator.penalizers.values():
        if penalizer.is_prepared():
            twin, name = copy(penalizer), sg.COUNTED[type(penalizer).__name__]
            setattr(twin, name, getattr(penalizer, name).clone())
            twins.append(twin)
    return _Twin(twins)


def _count(orchestrator, reqs: list, ends: list[int]) -> None:
    """Count each request's tokens up to number ``end`` that have not been counted."""
    if not orchestrator.is_required:
        return
    # SGLang adds a token's penalty once a step: the same float additions, in rounds that have no token twice.
    rounds: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, (req, end) in enumerate(zip(reqs, ends, strict=True)):
        if not _penalised(req.sampling_params):
            continue  # another request of the batch is
        seen: dict[int, int] = defaultdict(int)
        for token in req.output_ids[req.pat_penalised : end]:
            rounds[seen[token]].append((row, token))
            seen[token] += 1
        req.pat_penalised = max(req.pat_penalised, end)
    for pairs in rounds.values():
        rows, tokens = torch.tensor(pairs, device=orchestrator.device).unbind(1)
        for penalizer in orchestrator.penalizers.values():
            if penalizer.is_prepared():
                _add(penalizer, rows, tokens)


def _penalised(params) -> bool:
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1
        or params.min_new_tokens > 0
    )


def _add(penalizer, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """What ``_cumulate_output_tokens`` does, for one token of some of the rows, int64 [pairs] each."""
    counted = getattr(penalizer, sg.COUNTED[type(penalizer).__name__])
    match type(penalizer).__name__:
        case "BatchedFrequencyPenalizer":
            counted[rows, tokens] += penalizer.frequency_penalties[rows, 0]
        case "BatchedPresencePenalizer":
            counted[rows, tokens] = penalizer.presence_penalties[rows, 0]
        case "BatchedRepetitionPenalizer":
            counted[rows, tokens] = penalizer.repetition_penalties[rows, 0]
        case "BatchedMinNewTokensPenalizer":
            counted.index_add_(0, rows, torch.ones_like(rows, dtype=counted.dtype)[:, None])
