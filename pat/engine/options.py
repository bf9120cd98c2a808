"""What of ``rollout.sglang`` the engine would refuse, found without importing SGLang, which takes seconds."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pat.engine import refusals

# Arguments of the engine that have a place of their own in the configuration.
ELSEWHERE = {
    "model_path": "model.source",
    "dtype": "model.dtype",
    "ranks": "ranks",
    "tp_sizes": "tp_sizes",
    "policy": "arms",
    "max_new_tokens": "rollout.max_response",
    "kv_costs": "policy.kv",
    "skip_tokenizer_init": "nothing: verl and PAT exchange token ids",
}
ENGINE = ("deadline_s", "graph_memory_bytes")  # pat.Engine's own arguments that may be given here
ORDER = "srt/arg_groups/field_order.py"  # SGLang 0.5.23: the names of all fields of ServerArgs, and nothing else


@cache
def known() -> frozenset[str]:
    """SGLang's arguments; none where it is not installed. Raises ValueError if its table is not where it was."""
    package = importlib.util.find_spec("sglang")
    if package is None:
        return frozenset()
    file = Path(package.submodule_search_locations[0], ORDER)
    assigned = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    (names,) = (ast.literal_eval(node.value) for node in assigned if node.targets[0].id == "POSITIONAL_FIELD_ORDER")
    return frozenset(names)


def problems(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(option, what is allowed) for each that SGLang does not know, PAT sets itself or PAT refuses."""
    names = known()
    for name in options:
        if name in ELSEWHERE:
            yield name, f"no value here; set {ELSEWHERE[name]}"
        elif names and name not in names | refusals.OPTIONS.keys() | {*ENGINE}:
            close = difflib.get_close_matches(name, [*names, *ENGINE], n=1)
            yield name, "an argument of sglang.Engine" + (f" (did you mean {close[0]}?)" if close else "")
        else:
            try:
                refusals.check_options({name: options[name]})
            except ValueError as error:
                yield name, f"what PAT supports; {error}"
