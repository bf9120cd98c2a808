"""The command line: each stage of the pipeline by hand, and what helps around it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pat import home
from pat.owner import Busy, only
from pat.problems import ConfigError, Problem, shown

if TYPE_CHECKING:  # every command imports what it needs: most are started often, and briefly
    from pat.config import Section

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Adaptive tensor parallelism for RLHF rollouts: each stage of the pipeline by hand, and what helps around it.",
    epilog="Examples: pat doctor; pat train --help; all stages in their order: snakemake --profile local all",
)

DEFAULT = Path("config/config.yaml")
ConfigPath = Annotated[
    Path, typer.Option("--config", help="A configuration (YAML), or a stage's own part of it (JSON).")
]
Experiment = Annotated[str | None, typer.Option(help="Which experiment of the YAML file.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the experiment; results/EXPERIMENT if left out.")]


def _stage(stage: str, path: Path, experiment: str | None, out: Path | None) -> tuple[Section, Path]:
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


@app.command(epilog="Example: pat hardware --config config/ci.yaml --experiment ci-qwen3")
def hardware(config: ConfigPath = DEFAULT, experiment: Experiment = None, out: Out = None) -> None:
    """Find out what there is to run on."""
    _, out = _stage("hardware", config, experiment, out)
    from pat import cluster

    with only(out, "hardware"):
        cluster.run(out)


@app.command(epilog="Example: pat assets --config config/ci.yaml --experiment ci-qwen3")
def assets(config: ConfigPath = DEFAULT, experiment: Experiment = None, out: Out = None) -> None:
    """Get the model and the prompts ready."""
    cfg, out = _stage("assets", config, experiment, out)
    from pat import assets

    with only(out, "assets"):
        assets.run(cfg, out)


@app.command(epilog="Example: pat profile --config config/ci.yaml --experiment ci-qwen3")
def profile(config: ConfigPath = DEFAULT, experiment: Experiment = None, out: Out = None) -> None:
    """Time decode, prefill and switches in the real engine, or take them from published measurements."""
    cfg, out = _stage("profile", config, experiment, out)
    if cfg.profile.source == "aiconfigurator":
        from pat.predictor import reference as profile
    else:
        from pat import profile

    with only(out, "profile"):
        profile.run(cfg, out)


@app.command(epilog="Example: pat predictor --config config/ci.yaml --experiment ci-qwen3")
def predictor(config: ConfigPath = DEFAULT, experiment: Experiment = None, out: Out = None) -> None:
    """Fit the latency and cost models to the profile."""
    _, out = _stage("predictor", config, experiment, out)
    from pat.predictor import fit

    with only(out, "predictor"):
        fit.run(out / "profile", out / "predictor")


@app.command(epilog="Example: pat train --arm pat --config config/ci.yaml --experiment ci-qwen3")
def train(
    arm: Annotated[str, typer.Option(help="tpK: stays at K. thresholdN: widest once N are left. pat: by prediction.")],
    config: ConfigPath = DEFAULT,
    experiment: Experiment = None,
    out: Out = None,
) -> None:
    """Train with real verl and measure every iteration."""
    cfg, out = _stage(f"train-{arm}", config, experiment, out)
    from pat.rl import train

    with only(out, f"train-{arm}"):
        train.run(cfg, out, arm)


@app.command(epilog="Example: pat simulate --config config/ci.yaml --experiment ci-qwen3")
def simulate(config: ConfigPath = DEFAULT, experiment: Experiment = None, out: Out = None) -> None:
    """Simulate the generation stage in every arm, and the best schedule with the lengths known."""
    cfg, out = _stage("simulate", config, experiment, out)
    model = out / "predictor" / "model.json"
    if not model.exists():
        raise ConfigError(Problem(("--out",), str(model), "a file that exists: run `pat predictor` first"))
    from pat.simulate.run import run

    with only(out, "simulate"):
        run(cfg, model, out / "simulate")


@app.command(epilog="Example: pat report --config config/ci.yaml --experiment ci-qwen3")
def report(config: ConfigPath = DEFAULT, experiment: Experiment = None, out: Out = None) -> None:
    """Write the report that compares the arms."""
    cfg, out = _stage("report", config, experiment, out)
    from pat import jobs, report

    with only(out, "report"):
        jobs.collect(out)
        report.run(out, cfg.report.title, out / "report")


@app.command(epilog="Example: pat track --stage train-pat --config config/ci.yaml --experiment ci-qwen3")
def track(
    stage: Annotated[str, typer.Option(help="hardware, assets, profile, predictor, train-ARM, simulate or report.")],
    config: ConfigPath = DEFAULT,
    experiment: Experiment = None,
    out: Out = None,
) -> None:
    """Log a finished stage to MLflow."""
    cfg, out = _stage("tracking", config, experiment, out)
    from pat import tracking

    read = out / "config" / f"{stage}.json"
    params = json.loads(read.read_text(encoding="utf-8")) if read.exists() else {}
    tracking.run(out, stage, cfg.tracking, params, out / "tracking" / f"{stage}.json")


@app.command(epilog="Example: pat ui --config config/ci.yaml --port 5001")
def ui(
    config: ConfigPath = DEFAULT,
    experiment: Experiment = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where it listens, on 127.0.0.1.")] = 5000,
) -> None:
    """Show in MLflow what was logged, from where tracking.uri says that it is."""
    from pat import configfile, ui

    ui.run(configfile.load(config), experiment, port)


bench_app = typer.Typer(no_args_is_help=True, help="Measure parts by themselves.")
app.add_typer(bench_app, name="bench")


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
    cfg, folder = _stage("train-pat", config, experiment, None)
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
    cfg, folder = _stage("simulate", config, experiment, None)
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


@app.command(epilog="Example: pat check --config config/ci.yaml")
def check(config: ConfigPath = DEFAULT) -> None:
    """Check a configuration file."""
    from pat import configfile

    for name, experiment in configfile.load(config).items():
        for warning in configfile.warnings(experiment):
            typer.echo(f"warning: {warning}", err=True)
        arms = ", ".join(experiment.arms) or "none, only simulated"
        typer.echo(f"{name}: arms {arms}; {experiment.model.source}, {experiment.data.source}")


@app.command(epilog="Example: pat where --config config/ci.yaml")
def where(config: ConfigPath = DEFAULT) -> None:
    """Say where the results of a configuration are."""
    from pat import configfile

    for name in configfile.load(config):
        report = Path("results") / name / "report" / "index.html"
        typer.echo(f"Report of {name}: {report if report.exists() else 'not written yet'}")
    typer.echo("Every stage in MLflow: make ui")


@app.command(epilog="Example: pat doctor --config config/ci.yaml")
def doctor(config: ConfigPath = DEFAULT) -> None:
    """Say whether this machine can run PAT, what is missing and how to get it."""
    from pat import doctor

    raise typer.Exit(0 if doctor.run(config) else 1)


@app.command(name="gpu-check", epilog="Example: pat gpu-check --out gpu-check.json")
def gpu_check(
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("gpu-check.json"),
    model: Annotated[
        Path | None, typer.Option(help="Folder of a config.json; Llama-3.1-8B's shape if left out.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Try the check itself, on a tiny model without a GPU.")] = False,
) -> None:
    """Test and time PAT on this machine's GPUs against SGLang itself, in ten minutes, and write one file to send."""
    from pat import gpu_check

    try:
        done = gpu_check.run(out, model, cpu)
    except RuntimeError as error:
        typer.echo(f"gpu-check: {error}", err=True)
        done = False
    raise typer.Exit(0 if done else 1)


@app.command(name="schema", epilog="Example: pat schema > config/schema.json")
def print_schema() -> None:
    """Print the JSON schema of configuration files (kept as config/schema.json)."""
    from pat import config as schema

    typer.echo(schema.json_schema(), nl=False)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: pat logged report.log report --config config/ci.yaml --experiment ci-qwen3",
)
def logged(context: typer.Context, log: Annotated[Path, typer.Argument(help="Where its output is kept.")]) -> None:
    """Run another pat command and keep its output; if it fails, print the lines that matter."""
    from pat.logged import run

    name = f"pat {' '.join(context.args)}"
    raise typer.Exit(run([sys.executable, "-m", "pat.cli", *context.args], log, name))


def main() -> None:
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of another encoding lacks some characters
    home.ensure()
    try:
        app()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except Busy as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
