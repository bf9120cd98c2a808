"""A copy of the project to run the workflow in."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copy_project(folder: Path, origin: Path = ROOT) -> Path:
    """Copy what a run of the workflow reads into ``folder``, without any results."""
    for name in ("Snakefile", "workflow", "config", "envs", "pat", "local", "slurm"):
        source = origin / name
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name, follow_symlinks=False)
    return folder
