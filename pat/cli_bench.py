"""``pat bench``: parts measured by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pat.cli_options import DEFAULT, ConfigPath, Experiment, stage_of
from pat.problems import ConfigError, Problem, shown

bench_app = typer.Typer(no_args_is_help=True, help="Measure parts by themselves.")


@bench_app.callback()
def _bench() -> None:
    """Measure parts by themselves."""


@bench_app.command(epilog="Example: pat bench rollout --only a,c --repeats 3")
def rollout(
    config: ConfigPath = DEFAULT,
    experiment: Experiment = None,
    workloads: Annotated[Path, typer.Option(help="Workloads: a YAML file.")] = Path("config/workloads.yaml"),
    only: Annotated[str, typer.Option(help="Some of them, as a,c; all if left out.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Generations of each arm and workload.")] = 5,
    out: Annotated[Path, typer.Option(help="Where rollout.json and rollout.html go; continued there.")] = Path(
        "results/bench"
    ),
) -> None:
    """Replay generation stages in every arm, without training.

    Reads the model and the predictor that the pipeline has left under results/EXPERIMENT.
    """
    from pat import workload

    chosen = workload.load(workloads, [name for name in only.split(",") if name] or None)
    cfg, folder = stage_of("train-pat", config, experiment, None)
    for needed in (folder / "model" / "config.json", folder / "predictor" / "model.json"):
        if not needed.exists():
            raise ConfigError(Problem(("--experiment",), str(needed), "a file that exists: run the pipeline first"))
    from pat import bench

    with only(out, "rollout"):
        bench.run(cfg, folder, chosen, repeats, out)


@bench_app.command(epilog="Example: pat bench decision --live 16,1024")
def decision(
    config: ConfigPath = DEFAULT,
    experiment: Experiment = None,
    live: Annotated[str, typer.Option(help="Numbers of live requests.")] = "16,64,1024",
    out: Annotated[Path, typer.Option(help="Where decision.json goes.")] = Path("results/bench"),
) -> None:
    """Time the policy's decisions against a decode step and over a simulated generation.

    Reads the predictor that the pipeline has left under results/EXPERIMENT.
    """
    cfg, folder = stage_of("simulate", config, experiment, None)
    predictor = folder / "predictor" / "model.json"
    if not predictor.exists():
        raise ConfigError(Problem(("--experiment",), str(predictor), "a file that exists: run `pat predictor` first"))
    counts = [number.strip() for number in live.split(",")]
    if not all(number.isdigit() and int(number) for number in counts):
        raise ConfigError(Problem(("--live",), shown(live), "whole numbers from 1 on, as 16,64"))
    from pat import bench_decision

    bench_decision.run(cfg, predictor, [int(number) for number in counts], out)


@bench_app.command(name="switch", epilog="Example: pat bench switch --requests 1024 --tokens 8192")
def bench_switch(
    requests: Annotated[int, typer.Option(min=1, help="Unfinished requests of the node.")] = 1024,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of each, prompt and response.")] = 8192,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the node.")] = 8,
    sizes: Annotated[str, typer.Option(help="Tensor-parallel sizes before and after.")] = "1,8",
    out: Annotated[Path, typer.Option(help="Where switch.json goes.")] = Path("results/bench"),
) -> None:
    """Time the host's work for unfinished requests at a switch, and for the live list at a step.

    In this one process, with SGLang's request objects and no model.
    """
    parts = [part.strip() for part in sizes.split(",")]
    if len(parts) != 2 or not all(part.isdigit() and int(part) and ranks % int(part) == 0 for part in parts):
        raise ConfigError(Problem(("--sizes",), shown(sizes), f"two sizes that divide {ranks} ranks, as 1,{ranks}"))
    from pat import bench_switch

    bench_switch.run(requests, tokens, ranks, (int(parts[0]), int(parts[1])), out)
