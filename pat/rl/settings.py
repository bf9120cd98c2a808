"""What a verl job tells PAT: ``actor_rollout_ref.rollout.custom.pat.*``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Every key has a default; the policy that is one, pat, needs ``predictor``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str = "pat"
    """The arm: pat (predictive), tpK (stay at K), thresholdN (widest once N requests of this replica are left)."""
    tp_sizes: tuple[int, ...] = ()
    """Sizes that may be used; default: every power of two up to the replica's ranks."""
    predictor: Path | None = None
    """model.json that ``pat predictor`` wrote."""
    margin: float = 0.1
    max_switch_share: float = 0.1
    max_switches: int = 4
    kv: Literal["auto", "migrate", "recompute"] = "auto"
    seed: int = 0
    """Run seed, from which each request's sampling seed is derived."""
    requests: int | None = None
    """Requests of one iteration on this replica; if given, any other number is an error."""
    lengths: tuple[int, ...] | None = None
    """Replayed response lengths, tokens; None: natural."""
    deadline_s: float = 1800.0
    """Longest that a request of an iteration may take, seconds; then the iteration fails."""
    kv_tokens: int | None = None
    """Size of one rank's KV cache at tp 1, tokens; None: what SGLang finds room for."""
    log: Path | None = None
    """Folder for one JSON file an iteration and replica."""

    @classmethod
    def from_verl(cls, custom: Mapping[str, Any] | None, ranks: int) -> Settings:
        """From ``rollout.custom``; ``ranks`` is the replica's size. Raises pydantic.ValidationError."""
        values = dict((custom or {}).get("pat") or {})
        settings = cls.model_validate(values)
        if settings.tp_sizes:
            return settings
        powers = tuple(2**i for i in range(ranks.bit_length()) if ranks % 2**i == 0)
        return settings.model_copy(update={"tp_sizes": powers})

    @property
    def policy_settings(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("margin", "max_switch_share", "max_switches", "kv")}
