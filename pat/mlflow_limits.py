"""What MLflow takes as a name and how long a value may be (mlflow.utils.validation, 3.17); pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

METRICS, PARAMS = 1000, 100  # of one request
NAME, PARAM, TAG, EXPERIMENT_TAG, DATASET, RUN = 250, 6000, 8000, 20_000, 500, 250  # characters
_REFUSED = re.compile(r"[^/\w.\- :]")


def name(text: str) -> str:
    """``text`` as the name of a parameter, metric or tag; a name that is allowed stays as it is.

    Where Hydra's + or ++ begins a part it goes; other characters, and dots that begin a part of a path,
    become underscores, an empty part one too.
    """
    plain = _REFUSED.sub("_", re.sub(r"(^|\.)\++", r"\1", text))
    parts = ["_" * (len(part) - len(rest := part.lstrip("."))) + rest or "_" for part in plain.split("/")]
    return shortened("/".join(parts), NAME)


def names(settings: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """Parameters with names and values that MLflow takes; of two that would get the same name both stay."""
    taken: dict[str, str] = {}
    for key, value in settings:
        short = name(key)
        if short in taken:
            short = shortened(f"{short}-{_digest(key)}", NAME)
        taken[short] = value[:PARAM]
    return taken


def shortened(text: str, most: int) -> str:
    """``text``, or as much of it as leaves room for a digest of all of it, so that two long ones stay apart."""
    return text if len(text) <= most else f"{text[: most - 9]}-{_digest(text)}"


def listed(items: Iterable[str], most: int = DATASET) -> str:
    """``items`` with commas, as many as fit into ``most`` characters, and how many more there are."""
    items = list(items)
    for shown in range(len(items), 0, -1):
        more = f" and {len(items) - shown} more" if shown < len(items) else ""
        if len(text := ", ".join(items[:shown]) + more) <= most:
            return text
    return shortened(", ".join(items), most)


def lines(text: str, most: int) -> str:
    """``text``, or as many of its lines as fit into ``most`` characters, with a line that says so."""
    if len(text) <= most:
        return text
    told = "\n(cut: the rest is in report/summary.json)"
    return text[: most - len(told)].rpartition("\n")[0] + told


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
