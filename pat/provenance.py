"""Where a result comes from: versions of the packages and the commit of the code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from pat.cluster import versions


def git_sha() -> str | None:
    """The commit of the code's checkout; None outside of one or without git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def facts() -> dict[str, Any]:
    return {"versions": versions(), "git": git_sha(), "slurm_job_id": os.environ.get("SLURM_JOB_ID")}
