"""Puts numbers, sentences and figures together: report/index.html, report/summary.json and report/*.png."""

import base64
import json
import os
import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pat.report import experiment as experiment_files
from pat.report import figures, setup, simulation, style, wording
from pat.report.experiment import Experiment
from pat.report.summary import live_switches, summarise
from pat.report.wording import DASH, count, duration, number, percent, share

# key, label, unit, whether less or more is better (None: neither), how a value is written
TABLE = (
    ("gen_s", "Generation", "s", min, number),
    ("iteration_s", "Iteration", "s", min, number),
    ("tokens_per_s", "Throughput", "tokens/s", max, number),
    ("tokens", "Generated", "tokens", None, count),
    ("response_len_max", "Longest response", "tokens", None, count),
    ("tail_share", "Tail: ≤ 10 % of the batch alive", "% of generation", min, share),
    ("switches", "Switches", "per iteration", None, count),
    ("switch_s", "Time in switches", "s", None, number),
    ("old_log_prob_s", "Old log-prob", "s", None, number),
    ("update_s", "Policy update", "s", None, number),
    ("weight_sync_s", "Weight sync", "s", None, number),
    ("reward_mean", "Reward", "mean", None, number),
)
ROLES = (("default", "Default (lowest tp)"), ("worst_static", "Worst static"), ("best_static", "Best static"))
MAX_SWITCH_ROWS = 40
LOCAL_UI = "http://127.0.0.1:5000"  # make ui


def run(experiment_dir: Path, title: str, out: Path) -> None:
    """Writes the report of the experiment in `experiment_dir` (results/EXPERIMENT) into the folder `out`.

    Everything is read, checked and drawn before the first file is written: after an error an earlier report
    is still whole. FileNotFoundError or ValueError name the input that is missing or unusable.
    """
    experiment = experiment_files.load(Path(experiment_dir))
    summary = {"title": title} | summarise(experiment)
    summary["published"] = [
        row | {"result": asdict(row["result"])} for row in simulation.beside_published(experiment, summary["arms"])
    ]
    if experiment.arms:
        summary["answer"] = {what: wording.answer(summary, what) for what in wording.DURATIONS}
    else:
        summary["answer"] = {"gen": simulation.simulated_answer(experiment.simulated.summary), "iteration": None}
    summary["verdict"] = wording.verdict(summary["fastest"] or summary["simulated"]["fastest"], summary["matched"])
    drawn = {name: figure for name, figure in figures.draw(experiment, summary).items() if figure}
    images = {f"{name}.png": style.png(figure) for name, figure in drawn.items()}
    html = render(experiment, summary, {name: Markup(style.svg(figure, name)) for name, figure in drawn.items()})

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for figure in out.glob("*.png"):  # an earlier report may have had a figure that this one has not
        figure.unlink()
    for name, image in images.items():
        (out / name).write_bytes(image)
    (out / "summary.json").write_text(
        json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
    (out / "index.html").write_text(html, encoding="utf-8")
    print(f"{summary['answer']['gen']}\nreport: {out / 'index.html'}")


def render(experiment: Experiment, summary: dict, svgs: dict[str, Markup]) -> str:
    """The page as HTML. `svgs` holds the figures that there are, by name."""
    environment = Environment(
        loader=PackageLoader("pat.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "count": count, "glue": _glue, "length_of": duration}
    environment.filters |= {"arm_label": simulation.label}
    switches = [
        {"arm": name} | row for name, arm in experiment.arms.items() for row in live_switches(arm).iter_rows(named=True)
    ]
    fit = experiment.predictor_fit
    simulated = experiment.simulated.summary if experiment.simulated else None
    policies = simulation.policies(simulated["arms"]) if simulated else []
    published = simulation.beside_published(experiment, summary["arms"])
    return environment.get_template("report.html.j2").render(
        title=summary["title"],
        name=experiment.name,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        model=setup.model_name(experiment),
        machine=setup.machine_name(experiment),
        trained=bool(experiment.arms),
        summary=summary,
        settled=wording.settled(summary),
        cautions=wording.cautions(experiment, summary),
        setup=setup.rows(experiment),
        colours=style.arm_colours([*experiment.arms]) | style.arm_colours(policies),
        table=_table(summary),
        gains=_gains(summary),
        prob_diffs={name: values["prob_diff_max"] for name, values in summary["arms"].items()},
        svgs=svgs,
        errors=experiment.predictor_errors,
        fit=f"data:image/png;base64,{base64.b64encode(fit).decode()}" if fit else None,
        switches=switches[:MAX_SWITCH_ROWS],
        switches_left_out=max(0, len(switches) - MAX_SWITCH_ROWS),
        simulated=simulated,
        policies=policies,
        changed=simulation.ablations(simulated["arms"]) if simulated else [],
        simulated_says=_simulated_says(experiment),
        published=published,
        published_says=simulation.published_sentences(published),
        rollouts=experiment.rollouts,
        stages=experiment.stages,
        with_jobs=any(stage.job for stage in experiment.stages),
        with_energy=any(stage.energy_wh for stage in experiment.stages),
        mlflow=_mlflow(experiment.name),
    )


def _simulated_says(experiment: Experiment) -> list[str]:
    """The outcome of the simulation in sentences; where nothing was trained the first of them heads the page."""
    if experiment.simulated is None:
        return []
    summary = experiment.simulated.summary
    return [*([simulation.simulated_answer(summary)] if experiment.arms else []), simulation.limit(summary)]


def _mlflow(name: str) -> str:
    """Where MLflow shows the experiment: the server that jobs log to, else the one that `make ui` starts."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    base = uri.rstrip("/") if uri.startswith(("http://", "https://")) else LOCAL_UI
    return f"{base}/#/experiments?experimentSearchFilter={quote(name)}&workflowType=machine_learning"


def _glue(text: str) -> str:
    """Keeps a number and its unit on one line."""
    return re.sub(r"(?<=\d) (?=s\b|%)", "\N{NO-BREAK SPACE}", text)


def _table(summary: dict) -> list[dict]:
    """One row a metric with one cell an arm: median, range, and whether it is the best of the arms."""
    rows = []
    for key, label, unit, best_of, write in TABLE:
        medians = {name: values[key] for name, values in summary["arms"].items()}
        known = [value for value in medians.values() if value is not None]
        if not known:
            continue
        best = best_of(known) if best_of and len(set(known)) > 1 else None
        cells = []
        for name, median in medians.items():
            low, high = (summary["spread"][name] or {}).get(key, (None, None))
            spread = "" if low == high else f"{write(low)}{DASH}{write(high)}"
            cells.append({"median": write(median), "spread": spread, "best": best is not None and median == best})
        rows.append({"label": label, "unit": unit, "cells": cells})
    return rows


def _gains(summary: dict) -> list[dict]:
    """PAT against each reference, generation and iteration; no rows where there is nothing to compare."""
    rows = [
        {
            "label": label,
            "cells": [
                {
                    "arm": summary["references"][what][role],
                    "gain": summary["gain_pct"][what][role],
                    "spread": summary["gain_spread_pct"][what][role],
                }
                for what in wording.DURATIONS
            ],
        }
        for role, label in ROLES
    ]
    oracle = [
        {"arm": "simulated", "gain": summary["gain_pct"][what]["oracle"], "spread": None} for what in wording.DURATIONS
    ]
    rows.append({"label": "Oracle (knows the lengths)", "cells": oracle})
    known = any(cell["gain"] is not None for row in rows for cell in row["cells"])
    return rows if known and "pat" in summary["arms"] else []
