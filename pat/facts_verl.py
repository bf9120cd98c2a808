"""verl's own metrics of a training (verl 0.9.1) as an experiment tracker gets them: losses, gradients, KL (pure)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Sections that PAT's own metrics tell, from the same source (pat.rl.collect), and counters that are the step itself.
TOLD = ("timing_s/", "timing_per_token_ms/", "training/global_step", "training/epoch")
# What a running training already shows of PAT's own metrics.
LIVE = {
    "gen/seconds": "timing_s/gen",
    "iteration/seconds": "timing_s/step",
    "iteration/update_s": "timing_s/update_actor",
    "reward/mean": "critic/rewards/mean",
    "response/tokens_mean": "response_length/mean",
}
_UNNAMEABLE = re.compile(r"[^\w ./:-]", re.ASCII)  # val-core/x/acc/mean@1: trackers forbid some characters


def metrics(data: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, value) of the numbers in one line of verl.jsonl: ``verl/`` and verl's own name.

    Trackers draw a section of charts for what stands before the last slash, in alphabetical order: PAT's come first.
    """
    for name, value in data.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if number and not name.startswith(TOLD):
            yield _UNNAMEABLE.sub("_", f"verl/{name}"), float(value)


def live(data: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The same of an iteration of a training that still runs, with those of PAT's metrics that verl knows."""
    yield from ((ours, float(data[theirs])) for ours, theirs in LIVE.items() if data.get(theirs) is not None)
    yield from metrics(data)
