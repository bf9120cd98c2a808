"""The figures of what was simulated, and of how well predictions fit. None where there is nothing to draw."""

from __future__ import annotations

import matplotlib
import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from pat.report import simulation
from pat.report.experiment import Experiment, Simulated
from pat.report.published import RESULTS, applies
from pat.report.setup import model_name
from pat.report.style import RC, WIDTH, arm_colours, plain_figure
from pat.report.summary import calibration
from pat.report.wording import number, percent

INK = "#1f2328"
MAX_ITERATIONS = 4  # curves of the length model
VALIDATED_PCT = 10  # the simulator is to be as close to the real engine, per cent


def draw(experiment: Experiment) -> dict[str, Figure | None]:
    """All of them by name."""
    simulated = experiment.simulated
    with matplotlib.rc_context(RC):
        return {
            "simulated": generation(simulated) if simulated else None,
            "simulated_live": live(simulated) if simulated else None,
            "published": published_gains(experiment) if simulated else None,
            "ablations": ablations(simulated) if simulated else None,
            "validation": validation(experiment.rollouts) if experiment.rollouts else None,
            "calibration": length_model(experiment),
        }


def generation(simulated: Simulated) -> Figure:
    """Median generation time of every policy, and the range of the repeats."""
    summary = simulated.summary
    names = simulation.policies(summary["arms"])
    colours = arm_colours(names)
    figure, axes = plain_figure(0.8 + 0.42 * len(names))
    longest = 0.0
    for row, name in enumerate(names):
        median, (low, high) = summary["arms"][name]["gen_s"], summary["spread"][name]
        hindsight = name in simulation.HINDSIGHT
        axes.barh(row, median, height=0.62, color="none" if hindsight else colours[name], edgecolor=colours[name])
        if high > low:
            axes.errorbar(median, row, xerr=[[median - low], [high - median]], color=INK, capsize=4, linewidth=1.2)
        text = f"{number(median)} s"
        axes.annotate(text, (high, row), (7, 0), textcoords="offset points", va="center", weight="bold")
        longest = max(longest, high)
    best = summary["best_static"]
    axes.set_yticks(range(len(names)), [f"{name}\nbest static" if name == best else name for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.18)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("simulated generation of one iteration, seconds")
    return figure


def live(simulated: Simulated) -> Figure:
    """Unfinished requests over time in the first iteration simulated; triangles are switches."""
    names = [name for name in simulation.policies(simulated.summary["arms"]) if not name.startswith("threshold")]
    colours = arm_colours(names)
    figure, axes = plain_figure(3.3)
    for name in names:
        row = simulated.rows.filter(arm=name).sort("repeat").row(0, named=True)
        style = "--" if name in simulation.HINDSIGHT else "-"
        at, count = [point["at_s"] for point in row["live"]], [point["live"] for point in row["live"]]
        axes.step(at, count, where="post", color=colours[name], label=f"{name}, starts at tp{row['start_tp']}"
                  if name in ("pat", "oracle") else name, linestyle=style)  # fmt: skip
        if name == "pat":
            for switch in row["schedule"]:
                if switch["node"] == 0:
                    alive = int(np.interp(switch["at_s"], at, count))
                    axes.plot(switch["at_s"], alive, "v", color=colours[name], markeredgecolor="white", markersize=9)
    axes.set_yscale("symlog", linthresh=1)  # the tail is what matters
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set(xlabel="seconds", ylabel="unfinished requests", ylim=(0, None), xlim=(0, None))
    axes.legend()
    return figure


def published_gains(experiment: Experiment) -> Figure | None:
    """What pat gains over each static size in the simulation, and the published gains as lines."""
    found = simulation.gains(experiment.simulated.summary["arms"], "gen_s")
    system = (experiment.config.get("profile") or {}).get("system")
    results = [result for result in RESULTS if applies(result, model_name(experiment), system)]
    if not found or not results:
        return None
    colours = arm_colours(simulation.policies(experiment.simulated.summary["arms"]))
    figure, axes = plain_figure(1.1 + 0.45 * len(found))
    for row, (name, gain) in enumerate(found.items()):
        axes.barh(row, gain, height=0.62, color=colours[name])
        axes.annotate(
            percent(gain), (max(gain, 0), row), (6, 0), textcoords="offset points", va="center", weight="bold"
        )
    for result in results:
        axes.axvline(result.gain_pct, color=INK, linestyle=":", linewidth=1.4)
        axes.annotate(f"published {result.gain_pct:g} %", (result.gain_pct, 1), (0, 3), ha="center", va="bottom",
                      xycoords=("data", "axes fraction"), textcoords="offset points")  # fmt: skip
    axes.set_yticks(range(len(found)), [f"over {name}" for name in found])
    axes.invert_yaxis()
    highest = max(*found.values(), *(result.gain_pct for result in results))
    axes.set_xlim(min(0.0, *found.values()) * 1.2, highest * 1.2)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("generation time that pat saves, %")
    return figure


def ablations(simulated: Simulated) -> Figure | None:
    """How much longer than the oracle pat takes with one part changed, and with no predictor at all."""
    summary = simulated.summary
    changed = simulation.ablations(summary["arms"])
    if not changed:
        return None
    names = ["pat", *sorted(changed, key=summary["regret_pct"].get)]
    names += [name for name in ("threshold",) if name in summary["arms"]]
    colours = {"pat": arm_colours(["pat"])["pat"]}
    figure, axes = plain_figure(0.9 + 0.3 * len(names))
    for row, name in enumerate(names):
        regret = summary["regret_pct"][name]
        axes.barh(row, regret, height=0.66, color=colours.get(name, "#8d99ae"))
        axes.annotate(f"{regret:.1f} %", (max(regret, 0), row), (5, 0), textcoords="offset points", va="center")
    words = {"pat": "pat", "threshold": "no predictor: threshold"}
    axes.set_yticks(range(len(names)), [words.get(name) or simulation.label(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(1.0, *(summary["regret_pct"][name] for name in names)))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("longer than the oracle, %")
    return figure


def validation(rollouts: dict) -> Figure | None:
    """Real generation stages with replayed lengths (dots: medians, whiskers: range) and the same simulated."""
    rows = validated(rollouts)
    if not rows:
        return None
    names = list(dict.fromkeys(row["arm"] for row in rows))
    colours = arm_colours(names)
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure, axes = plain_figure(1.1 + 0.27 * len(rows) + 0.12 * len(workloads))
    place, ticks, longest = 0.0, [], max(max(row["high"], row["predicted"]) for row in rows)
    for workload in workloads:
        for row in (row for row in rows if row["workload"] == workload):
            colour = colours[row["arm"]]
            axes.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=5, alpha=0.35)
            axes.plot(row["median"], place, "o", color=colour, markersize=7)
            axes.plot(row["predicted"], place, "D", color="none", markeredgecolor=INK, markersize=7)
            error = row["error_pct"]
            far = abs(error) > VALIDATED_PCT
            axes.annotate(f"{error:+.0f} %", (1, place), (-2, 0), xycoords=("axes fraction", "data"), va="center",
                          ha="right", textcoords="offset points", weight="bold" if far else "normal")  # fmt: skip
            ticks.append((place, f"{workload}  {row['arm']}"))
            place += 1
        place += 0.5
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.2)
    axes.plot([], [], "o", color=INK, label="measured")
    axes.plot([], [], "D", color="none", markeredgecolor=INK, label="simulated")
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("generation, seconds; at the right the simulator's error")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def validated(rollouts: dict) -> list[dict]:
    """A row for each workload and arm that was measured and simulated; error_pct is of the measured median."""
    rows = []
    for workload, result in (rollouts.get("workloads") or {}).items():
        predicted = result.get("predicted_s") or {}
        for arm, measured in result["arms"].items():
            if predicted.get(arm):
                median = measured["median"]
                error = 100 * (predicted[arm] / median - 1)
                low, high = min(measured["gen_s"]), max(measured["gen_s"])
                rows.append({"workload": workload, "arm": arm, "median": median, "low": low, "high": high}
                            | {"predicted": predicted[arm], "error_pct": error})  # fmt: skip
    return rows


def length_model(experiment: Experiment) -> Figure | None:
    """Share of responses still unfinished by their length: predicted from earlier iterations, and what came."""
    frame = calibration(experiment)
    if frame.is_empty():
        return None
    iterations = frame["iteration"].unique().sort().to_list()
    chosen = [iterations[i] for i in np.unique(np.linspace(0, len(iterations) - 1, MAX_ITERATIONS).round().astype(int))]
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.8, len(chosen)))
    figure = Figure(figsize=(WIDTH, 3.3), layout="constrained")
    axes = figure.subplots()
    for iteration, colour in zip(chosen, colours, strict=True):
        part = frame.filter(pl.col("iteration") == iteration).sort("tokens")
        axes.plot(part["tokens"], part["observed"], color=colour, label=f"iteration {iteration}")
        axes.plot(part["tokens"], part["predicted"], color=colour, linestyle="--")
    axes.plot([], [], color=INK, linestyle="--", label="predicted")
    axes.set(xlabel="tokens", ylabel="share of responses longer", ylim=(0, 1.02), xlim=(0, None))
    axes.legend()
    return figure
