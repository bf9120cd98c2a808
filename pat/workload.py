"""Generation stages with known response lengths, to be replayed: read from a file, drawn from a seed (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from pat import yamlfile
from pat.problems import ConfigError, Problem, shown
from pat.simulate.lengths import cut, lognormal, uniform

Count = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Group(_Strict):
    """``count`` responses of ``low`` to ``high`` tokens, each length as likely."""

    count: Count
    low: Count
    high: Count

    @model_validator(mode="after")
    def _ordered(self) -> Group:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class Lognormal(_Strict):
    """``count`` responses of scale * exp(normal(mu, sigma)) tokens, cut at ``cap``."""

    count: Count
    mu: float
    sigma: Annotated[float, Field(ge=0)]
    scale: Annotated[float, Field(gt=0)] = 1.0
    cap: Count


class Workload(_Strict):
    """One generation stage. Exactly one of lengths, groups and lognormal says how long its responses are."""

    about: str = ""
    lengths: Annotated[list[Count], Field(min_length=1)] | None = None
    groups: Annotated[list[Group], Field(min_length=1)] | None = None
    lognormal: Lognormal | None = None
    prompt: Count = 64
    """Tokens of a prompt."""
    samples_per_prompt: Count = 1

    @model_validator(mode="after")
    def _one_kind(self) -> Workload:
        if sum(kind is not None for kind in (self.lengths, self.groups, self.lognormal)) != 1:
            raise ValueError("exactly one of lengths, groups and lognormal must be given")
        return self

    def draw(self, seed: int) -> list[int]:
        """Response lengths, tokens; the same for the same seed."""
        if self.lengths:
            return list(self.lengths)
        rng = np.random.default_rng(seed)
        if self.groups:
            return [int(n) for g in self.groups for n in uniform(g.low, g.high)(rng, g.count)]
        law = self.lognormal
        return cut(law.scale * lognormal(law.mu, law.sigma)(rng, law.count), law.cap).tolist()

    def prompts(self, responses: int, vocabulary: int, seed: int) -> list[list[int]]:
        """Token ids of the prompt of each response; samples of one prompt have the same."""
        rng = np.random.default_rng([seed, 1])
        kinds = -(-responses // self.samples_per_prompt)
        made = rng.integers(0, vocabulary, (kinds, self.prompt)).tolist()
        return [made[i // self.samples_per_prompt] for i in range(responses)]


@dataclass(frozen=True)
class Replay:
    """A workload, drawn."""

    name: str
    about: str
    lengths: list[int]
    prompts: list[list[int]]
    samples_per_prompt: int = 1

    @property
    def cap(self) -> int:
        return max(self.lengths)

    @classmethod
    def of(cls, name: str, workload: Workload, vocabulary: int, seed: int) -> Replay:
        lengths = workload.draw(seed)
        prompts = workload.prompts(len(lengths), vocabulary, seed)
        return cls(name, workload.about, lengths, prompts, workload.samples_per_prompt)


def load(path: Path, names: list[str] | None = None) -> Mapping[str, Workload]:
    """The workloads of a YAML file, or those of ``names``. Raises ConfigError naming the key and what is allowed."""
    try:
        found = TypeAdapter(dict[str, Workload]).validate_python(yamlfile.read(path, "--workloads"))
    except ValidationError as error:
        raise ConfigError(
            *[Problem(tuple(map(str, e["loc"])), shown(e.get("input")), e["msg"]) for e in error.errors()]
        ) from None
    if unknown := set(names or ()) - found.keys():
        raise ConfigError(Problem(("--only",), shown(", ".join(sorted(unknown))), f"some of {', '.join(found)}"))
    return {name: found[name] for name in names or found}
