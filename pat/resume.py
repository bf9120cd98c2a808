"""Whether a measurement that was interrupted may go on: only with the same settings, machine, model and code."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pat import digest
from pat.cluster import versions

PACKAGE = Path(__file__).parent
CPU_INFO = Path("/proc/cpuinfo")


def fingerprint(settings: str, model: Path, code: Iterable[str], files: Iterable[Path] = ()) -> dict:
    """What must be equal for samples to belong together; equal inputs give equal results, ready for JSON.

    settings: of the stage, as JSON. model: folder of the checkpoint. code: patterns of files of the package.
    files: others that matter, by content.
    """
    config = model / "config.json"
    weights = sorted((path.name, path.stat().st_size) for path in model.glob("*.safetensors"))
    return {
        "settings": settings,
        "machine": [socket.gethostname(), _processor(), os.cpu_count()],
        "versions": versions(),
        "model": _digest([config]) + hashlib.sha256(repr(weights).encode()).hexdigest()[:16],
        "code": _of_code(path for pattern in code for path in PACKAGE.glob(pattern)),
        "files": _digest(files),
    }


def differences(one: dict, other: dict) -> list[str]:
    """Names of the parts in which two fingerprints differ."""
    return [name for name in one | other if one.get(name) != other.get(name)]


class Partial:
    """Samples by key in a file of JSON lines that grows with each; the first line is their fingerprint.

    A file with another fingerprint is begun anew. A process may be killed while it writes: a last line that is torn
    is dropped.
    """

    def __init__(self, path: Path, same: dict) -> None:
        self.path = path
        self.rows: dict[str, Any] = {}
        self.seconds = 0.0  # that measuring them took
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        header = _parsed(lines[0]) if lines else None
        if header == same:
            for row in filter(None, map(_parsed, lines[1:])):
                self.rows[row["key"]] = row["sample"]
                self.seconds += row["seconds"]
        elif header:
            print(f"{path} is of another {', '.join(differences(header, same))}: not continued", flush=True)
        kept = [{"key": key, "sample": sample, "seconds": 0.0} for key, sample in self.rows.items()]
        if kept:
            kept[-1]["seconds"] = self.seconds
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(row) + "\n" for row in (same, *kept)), encoding="utf-8")
        fresh.rename(path)

    def add(self, key: str, sample: Any, seconds: float) -> None:
        """Keep a sample, in the file too. sample: ready for JSON."""
        self.rows[key] = sample
        self.seconds += seconds
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "sample": sample, "seconds": seconds}) + "\n")


def _parsed(line: str) -> dict | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _of_code(paths: Iterable[Path]) -> str:
    return hashlib.sha256(repr(digest.of_code(paths, PACKAGE)).encode()).hexdigest()[:16]


def _digest(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        total.update(path.name.encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def _processor() -> str:
    if CPU_INFO.exists():
        names = {
            line.partition(":")[2].strip()
            for line in CPU_INFO.read_text(encoding="utf-8").splitlines()
            if "model name" in line
        }
        if names:
            return ", ".join(sorted(names))
    return platform.processor()
