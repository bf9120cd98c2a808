"""What several commands take: a configuration, an experiment in it, a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pat.problems import ConfigError, Problem, shown

if TYPE_CHECKING:  # every command imports what it needs: most are started often, and briefly
    from pat.config import Section

DEFAULT = Path("config/config.yaml")
ConfigPath = Annotated[
    Path, typer.Option("--config", help="A configuration (YAML), or a stage's own part of it (JSON).")
]
Experiment = Annotated[str | None, typer.Option(help="Which experiment of the YAML file.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the experiment; results/EXPERIMENT if left out.")]


def stage_of(stage: str, path: Path, experiment: str | None, out: Path | None) -> tuple[Section, Path]:
    """What ``stage`` reads of the configuration at ``path``, and the experiment's folder, made if need be."""
    from pat import arms, configfile
    from pat import config as schema

    if path.suffix == ".json":
        if not path.is_file():
            raise ConfigError(Problem(("--config",), shown(str(path)), "a file that exists"))
        config = schema.load_stage(path.read_text(encoding="utf-8"), stage)
        out = out or path.parent.parent
    else:
        configs = configfile.load(path)
        if experiment is None and len(configs) == 1:
            experiment = next(iter(configs))
        if experiment not in configs:
            raise ConfigError(Problem(("--experiment",), shown(experiment), f"one of {', '.join(configs)}"))
        config = schema.stage_config(configs[experiment], stage)
        out = out or Path("results") / experiment
    if stage.startswith("train-"):
        arm = stage.removeprefix("train-")
        if not arms.known(arm, config.tp_sizes):
            raise ConfigError(Problem(("--arm",), shown(arm), f"one of {arms.allowed(config.tp_sizes)}"))
    out.mkdir(parents=True, exist_ok=True)
    if "SLURM_JOB_ID" in os.environ:
        from pat import jobs
        from pat.doctor import check_node

        jobs.note(out, stage)
        check_node(stage, config)
    return config, out
