"""The command line: each stage of the pipeline by hand, and what helps around it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pat import home
from pat.cli_bench import bench_app
from pat.cli_options import DEFAULT, ConfigPath, Experiment, Out, stage_of
from pat.owner import Busy, only
from pat.problems import ConfigError, Problem

if TYPE_CHECKING:  # every command imports what it needs: most are started often, and briefly
    pass

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Adaptive tensor parallelism for RLHF rollouts: each stage of the pipeline by hand, and what helps around it.",
    epilog="Examples: pat doctor; pat train --help; all stages in their order: snakemake --profile local all",
)


@app.command(epilog="Example: pat hardware --config config/ci.yaml --experiment ci-qwen3")
def hardware(config: ConfigPath = DEFAULT, experiment: Experiment = None, out: Out = None) -> None:
    """Find out what there is to run on."""
    _, out = stage_of("hardware", config, experiment, out)
    from pat import cluster

    with only(out, "hardware"):
        cluster.run(out)


@app.command(epilog="Example: pat assets --config config/ci.yaml --experiment ci-qwen3")
def assets(config: ConfigPath = DEFAULT, experiment: Experiment = None, out: Out = None) -> None:
    """Get the model and the prompts ready."""
    cfg, out = stage_of("assets", config, experiment, out)
    from pat import assets

    with only(out, "assets"):
        assets.run(cfg, out)


@app.command(epilog="Example: pat profile --config config/ci.yaml --experiment ci-qwen3")
def profile(config: ConfigPath = DEFAULT, experiment: Experiment = None, out: Out = None) -> None:
    """Time decode, prefill and switches in the real engine, or take them from published measurements."""
    cfg, out = stage_of("profile", config, experiment, out)
    if cfg.profile.source == "aiconfigurator":
        from pat.predictor import reference as profile
    else:
        from pat import profile

    with only(out, "profile"):
        profile.run(cfg, out)


@app.command(epilog="Example: pat predictor --config config/ci.yaml --experiment ci-qwen3")
def predictor(config: ConfigPath = DEFAULT, experiment: Experiment = None, out: Out = None) -> None:
    """Fit the latency and cost models to the profile."""
    _, out = stage_of("predictor", config, experiment, out)
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
    cfg, out = stage_of(f"train-{arm}", config, experiment, out)
    from pat.rl import train

    with only(out, f"train-{arm}"):
        train.run(cfg, out, arm)


@app.command(epilog="Example: pat simulate --config config/ci.yaml --experiment ci-qwen3")
def simulate(config: ConfigPath = DEFAULT, experiment: Experiment = None, out: Out = None) -> None:
    """Simulate the generation stage in every arm, and the best schedule with the lengths known."""
    cfg, out = stage_of("simulate", config, experiment, out)
    model = out / "predictor" / "model.json"
    if not model.exists():
        raise ConfigError(Problem(("--out",), str(model), "a file that exists: run `pat predictor` first"))
    from pat.simulate.run import run

    with only(out, "simulate"):
        run(cfg, model, out / "simulate")


@app.command(epilog="Example: pat report --config config/ci.yaml --experiment ci-qwen3")
def report(config: ConfigPath = DEFAULT, experiment: Experiment = None, out: Out = None) -> None:
    """Write the report that compares the arms."""
    cfg, out = stage_of("report", config, experiment, out)
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
    cfg, out = stage_of("tracking", config, experiment, out)
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


app.add_typer(bench_app, name="bench")


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
