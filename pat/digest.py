"""Digests of what results rest on: equal for equal contents, whatever the times of the files (pure)."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

LENGTH = 16  # hexadecimal digits that are kept
FRESH_S = 2.0  # a file that changed so recently may change again within the resolution of its times


@cache
def code(path: Path) -> str:
    """Digest of what a Python file does: its comments, docstrings and layout do not count. Of other files: contents."""
    content = path.read_bytes()
    if path.suffix == ".py":
        with suppress(SyntaxError):  # somebody's own file: whoever runs it will say so
            content = ast.dump(_bare(ast.parse(content))).encode()
    return hashlib.sha256(content).hexdigest()[:LENGTH]


def of_code(paths: Iterable[Path], root: Path) -> dict[str, str]:
    """`code` of each file, by its path below ``root``."""
    return {path.relative_to(root).as_posix(): code(path) for path in sorted(paths)}


def _bare(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [each for each in body if not _is_text(each)]
    return tree


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class Digests:
    """Digests of whole files, which may be checkpoints of many gigabytes: each is read once, until it changes.

    What is known stands in a JSON file, by path: size, times of modification and of the inode's change (which no copy
    and no touch sets back), digest.
    """

    def __init__(self, known: Path) -> None:
        self.path = known
        try:
            self.known: dict[str, list] = json.loads(known.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.known = {}

    def of(self, files: Iterable[Path]) -> dict[str, str]:
        """Digest of each file's contents, by the path as it is given. Raises OSError if one cannot be read."""
        files = sorted(files)
        states = {file: _state(file) for file in files}
        unread = [file for file in files if self.known.get(_name(file), [])[:3] != states[file]]
        if (total := sum(states[file][0] for file in unread)) > 1 << 30:
            print(f"reading {total / 1e9:.0f} GB once, to notice when they change: {unread[0].parent}", flush=True)
        with ThreadPoolExecutor(max_workers=4) as pool:
            fresh = dict(zip(unread, pool.map(_digest, unread), strict=True))
        for file, digest in fresh.items():
            self.known[_name(file)] = [*states[file], digest]
        digests = {str(file): self.known[_name(file)][3] for file in files}
        if fresh:
            self._keep()
        return digests

    def _keep(self) -> None:
        settled = time.time_ns() - int(FRESH_S * 1e9)
        kept = {name: state for name, state in self.known.items() if max(state[1:3]) < settled}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(kept) + "\n", encoding="utf-8")
        fresh.rename(self.path)


def _name(file: Path) -> str:
    return str(file.absolute())


def _state(file: Path) -> list[int]:
    state = file.stat()
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:LENGTH]
