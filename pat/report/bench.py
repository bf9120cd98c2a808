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


def figure(workload: dict) -> Figure:
    """A bar for the median of each arm, and a dot for each repeat."""
    arms = workload["arms"]
    colours = arm_colours(list(arms))
    drawn = Figure(figsize=(5.6, 0.7 + 0.45 * len(arms)), layout="constrained")
    axes = drawn.subplots()
    for row, (name, arm) in enumerate(arms.items()):
        axes.barh(row, statistics.median(arm["gen_s"]), color=colours[name], height=0.6)
        axes.plot(arm["gen_s"], [row] * len(arm["gen_s"]), "o", color="white", markeredgecolor="#1f2328", markersize=4)
    axes.set_yticks(range(len(arms)), list(arms))
    axes.invert_yaxis()
    axes.set_xlabel("generation, seconds")
    axes.set_xlim(left=0)
    return drawn


def page(document: dict) -> str:
    """The HTML page, with figures inside, of what ``rollout.json`` holds."""
    with matplotlib.rc_context(RC):
        figures = {name: svg(figure(w), f"bench-{name}") for name, w in document["workloads"].items()}
    best = {name: best_static(w) for name, w in document["workloads"].items()}
    template = Environment(loader=PackageLoader("pat", "report"), autoescape=True).get_template("bench.html.j2")
    return template.render(document, figures=figures, best=best)
