"""The page of ``pat bench rollout``: for each workload the arms' times, and how they compare."""

from __future__ import annotations

import statistics

import matplotlib
from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure

from pat.report.style import RC, arm_colours, svg


def best_static(workload: dict) -> float:
    """Median seconds of the fastest static arm."""
    return min(arm["median"] for name, arm in workload["arms"].items() if name.startswith("tp"))


def error_pct(workload: dict) -> dict[str, float]:
    """Simulated against real median seconds of each arm, per cent."""
    arms, predicted = workload["arms"], workload.get("predicted_s", {})
    return {name: 100 * (predicted[name] / arm["median"] - 1) for name, arm in arms.items() if name in predicted}


def worst_error(document: dict) -> tuple[str, str, float] | None:
    """(workload, arm, per cent) where simulation and reality are furthest apart; None if nothing was simulated."""
    errors = [(name, arm, pct) for name, w in document["workloads"].items() for arm, pct in error_pct(w).items()]
    return max(errors, key=lambda each: abs(each[2]), default=None)


def figure(workload: dict) -> Figure:
    """A bar for the median of each arm, a dot for each repeat, a diamond for its simulated time."""
    arms = workload["arms"]
    colours = arm_colours(list(arms))
    drawn = Figure(figsize=(5.6, 0.9 + 0.45 * len(arms)), layout="constrained")
    axes = drawn.subplots()
    for row, (name, arm) in enumerate(arms.items()):
        axes.barh(row, statistics.median(arm["gen_s"]), color=colours[name], height=0.6)
        axes.plot(arm["gen_s"], [row] * len(arm["gen_s"]), "o", color="white", markeredgecolor="#1f2328", markersize=4)
        if name in workload.get("predicted_s", {}):
            axes.plot(workload["predicted_s"][name], row, "D", color="#1f2328", markersize=5, zorder=4)
    if workload.get("oracle_s"):
        axes.axvline(workload["oracle_s"], color="#57606a", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(arms)), list(arms))
    axes.invert_yaxis()
    axes.set_xlabel("generation, seconds (dots: repeats, diamond: simulated, dashed: oracle)")
    axes.set_xlim(left=0)
    return drawn


def page(document: dict) -> str:
    """The HTML page, with figures inside, of what ``rollout.json`` holds."""
    with matplotlib.rc_context(RC):
        figures = {name: svg(figure(w), f"bench-{name}") for name, w in document["workloads"].items()}
    best = {name: best_static(w) for name, w in document["workloads"].items()}
    worst = worst_error(document)
    template = Environment(loader=PackageLoader("pat", "report"), autoescape=True).get_template("bench.html.j2")
    return template.render(document, figures=figures, best=best, worst=worst)
