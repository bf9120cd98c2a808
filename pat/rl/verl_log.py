"""verl's metrics as its file logger leaves them (verl 0.9.1): a line of JSON an iteration (pure)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def verl_lines(out: Path) -> list[dict[str, Any]]:
    """verl's metrics so far: {"step": iteration, "data": {name: value}} an iteration, and first those of an
    interrupted training that this one goes on from. out: the arm's folder."""
    files = [file for name in ("verl-before.jsonl", "verl.jsonl") if (file := out / name).exists()]
    # a line without its end is being written
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    return list({line["step"]: line for line in lines}.values())
