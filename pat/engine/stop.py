"""One scheduler at a step boundary with all requests taken out of its batches, and the way on from there."""

from __future__ import annotations

import torch

from pat.engine import requests as unfinished
from pat.engine import sglang_api as sg


class Stop:
    """Made before anything is changed: it remembers once what ``now`` changes, and ``go_on`` puts it back.

    ``now`` may fail half-way and be called again.
    """

    def __init__(self, scheduler, device) -> None:
        self.scheduler, self.device = scheduler, device
        self.overlap, self.queue_limit = scheduler.enable_overlap, scheduler.max_queued_requests
        self.held = scheduler._engine_paused  # by the engine's user, who goes on
        self.done = False

    def now(self) -> dict[str, torch.Tensor]:
        """Stop at a step boundary. Returns {request id: pool locations of its KV}.

        The overlap scheduler has launched a step whose tokens are not known yet: its result is taken first, so that
        the requests are what they are after that step.
        """
        scheduler = self.scheduler
        if self.overlap and scheduler.last_batch and scheduler.result_queue:  # empty if this is the second try
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
        self.device.synchronize()
        locations = unfinished.kv_locations(scheduler)
        scheduler.enable_overlap = False  # the result that SGLang would take now has been taken
        scheduler.max_queued_requests = None  # a limit for new requests; those that are retracted are none
        try:
            scheduler.pause_generation(sg.PauseGenerationReqInput(mode="retract"))
        finally:
            scheduler.enable_overlap = self.overlap
        self.done = True
        return locations

    def go_on(self) -> None:
        """As before the stop; held by the engine's user, it stays so."""
        self.scheduler.max_queued_requests = self.queue_limit
        if not self.held:
            self.scheduler.continue_generation(sg.ContinueGenerationReqInput(torch_empty_cache=False))
