"""Where a result comes from: versions of the packages and the commit of the code."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pat.cluster import versions


def git_sha() -> str | None:
    """The commit of the code's checkout; None outside of one or without git."""
    return (_git("rev-parse", "HEAD") or "").strip() or None


def git_changes() -> str | None:
    """What the checkout's tracked files have that its commit has not, as a diff ("": nothing); None as above."""
    return _git("diff", "HEAD")


def packages() -> list[str]:
    """Every package of this environment, as pip freeze names them."""
    return sorted({f"{each.name}=={each.version}" for each in distributions() if each.name}, key=str.lower)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            encoding="utf-8",
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def facts() -> dict[str, Any]:
    return {"versions": versions(), "git": git_sha(), "slurm_job_id": os.environ.get("SLURM_JOB_ID")}
