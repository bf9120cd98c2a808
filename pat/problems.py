"""What is wrong with a configuration, in words that name the key, its value and what is allowed (pure)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

Place = tuple[str | int, ...]


def shown(value: Any) -> str:
    """``value`` as the user wrote it, cut to a length that fits a line."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class Problem:
    """At the path ``place`` there is ``got``, which is not ``allowed``."""

    place: Place
    got: str
    allowed: str

    def within(self, experiment: str, override: Mapping[str, Any]) -> Problem:
        """The same; as ``experiments.NAME.KEY`` if it is the experiment's ``override`` that sets the key."""
        node: Any = override
        for part in self.place:
            if not isinstance(node, Mapping):
                break  # an item of a list: whoever sets the list sets the item
            if part not in node:
                return self
            node = node[part]
        return replace(self, place=("experiments", experiment, *self.place))

    def __str__(self) -> str:
        return f"config error: {'.'.join(map(str, self.place))}: got {self.got}; allowed: {self.allowed}"


class ConfigError(Exception):
    """One or more problems; as a string, one line each."""

    def __init__(self, *problems: Problem) -> None:
        # A mistake in the common part of a file shows up in each of its experiments.
        super().__init__("\n".join(dict.fromkeys(map(str, problems))))
        self.problems = problems


def _fields(model: Any, place: Iterable[str | int]) -> list[str]:
    """Names of the keys allowed at ``place`` below the pydantic ``model``."""
    for part in place:
        model = model.model_fields[part].annotation
    return list(model.model_fields)


def translate(model: type[BaseModel], error: ValidationError) -> list[Problem]:
    """pydantic's errors on ``model`` in our words."""
    problems = []
    for item in error.errors():
        place, kind = item["loc"], item["type"]
        got, allowed = shown(item["input"]), item["msg"]
        if kind == "extra_forbidden":
            keys = _fields(model, place[:-1])
            close = difflib.get_close_matches(str(place[-1]), keys, n=1)
            got, allowed = (
                "an unknown key",
                ", ".join(keys) + (f" (did you mean {close[0]}?)" if close else ""),
            )
        elif kind == "missing":
            got, allowed = "nothing", "a value, there is no default"
        elif kind in ("model_type", "model_attributes_type"):
            allowed = f"a mapping with the keys {', '.join(_fields(model, place))}"
        else:
            for start in ("Input should be ", "Tuple should have ", "String should have ", "a valid "):
                allowed = allowed.removeprefix(start)
            allowed = allowed.partition(" after validation")[0]
        problems.append(Problem(place, got, allowed))
    return problems
