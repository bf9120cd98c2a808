"""What the authors of PAT report (arXiv 2605.23945), to be set beside what is found here. Pure.

The two gains of the abstract are "up to"; those of single models are from summaries of the paper's evaluation. All are
against "the original verl setup", whose tp the abstract does not give: `nearest` says which static size fits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

SOURCE = "arXiv 2605.23945"
REPRODUCED_PP = 5.0  # percentage points up to which a gain found here is said to reproduce a published one


@dataclass(frozen=True)
class Published:
    """One result. `what` is gen or iteration; `gain_pct` is time saved, of verl's time."""

    model: str
    machine: str
    system: str  # how profile.system begins on such a machine
    max_response: str
    what: str
    gain_pct: float


RESULTS = (
    Published("Llama-3.1-8B", "8 H100 SXM", "h100", "24K", "gen", 34.6),
    Published("Qwen3-14B", "8 H100 SXM", "h100", "16K", "gen", 32.0),
    Published("the best case", "", "", "", "iteration", 27.2),
)


def applies(result: Published, model: str, system: str | None) -> bool:
    """Whether a result is of this model on this kind of machine."""
    same = _plain(result.model) in _plain(model)
    return bool(result.system) and same and (system or "").startswith(result.system)


def nearest(result: Published, gains: Mapping[str, float]) -> tuple[str, float] | None:
    """The static size over which pat's gain here (per cent) comes closest to the published one, and that gain."""
    return min(gains.items(), key=lambda each: abs(each[1] - result.gain_pct)) if gains else None


def reproduced(result: Published, gain_pct: float) -> bool:
    return abs(gain_pct - result.gain_pct) <= REPRODUCED_PP


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
