"""The figures of the report, in the order of the page. A figure is None where there is nothing to draw."""

import matplotlib
import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pat.report import figures_simulated
from pat.report.experiment import PHASES, Experiment
from pat.report.style import PART_COLOURS, RC, arm_colours
from pat.report.style import plain_figure as _figure
from pat.report.summary import kept_iterations, live_batch, live_switches, typical_iteration
from pat.report.wording import number

PARTS = {
    "generation": "gen_s",
    "old log-prob": "old_log_prob_s",
    "update": "update_s",
    "weight sync": "weight_sync_s",
}
MAX_LABELS = 4


def draw(experiment: Experiment, summary: dict) -> dict[str, Figure | None]:
    """All figures by name."""
    simulated = figures_simulated.draw(experiment)
    if not experiment.arms:
        return simulated | {"headline": simulated["simulated"], "simulated": None}
    colours = arm_colours(list(experiment.arms))
    with matplotlib.rc_context(RC):
        return {
            "headline": generation(experiment, summary, colours),
            "live_batch": live(experiment, colours),
            "lengths": lengths(experiment, colours),
            "iteration": iteration(experiment),
            "savings": savings(experiment, colours),
            "switch_cost": switch_cost(experiment),
            "reward": reward(experiment, colours),
        } | simulated


def generation(experiment: Experiment, summary: dict, colours: dict[str, str]) -> Figure:
    """Median generation time an arm, its range, and a dot for each iteration."""
    best = summary["references"]["gen"]["best_static"]
    figure, axes = _figure(0.8 + 0.55 * len(experiment.arms))
    longest = 0.0
    for row, (name, arm) in enumerate(experiment.arms.items()):
        seconds = kept_iterations(arm.iterations)["gen_s"]
        median, low, high = summary["arms"][name]["gen_s"], seconds.min(), seconds.max()
        axes.barh(row, median, height=0.62, color=colours[name])
        if len(seconds) > 1:
            spread = [[median - low], [high - median]]
            axes.errorbar(median, row, xerr=spread, color="#1f2328", capsize=4, linewidth=1.2)
            axes.plot(seconds, [row] * len(seconds), "o", color="white", markeredgecolor="#1f2328", markersize=4.5)
        axes.annotate(
            f"{number(median)} s", (high, row), (7, 0), textcoords="offset points", va="center", weight="bold"
        )
        longest = max(longest, high)
    names = [f"{name}\nbest static" if name == best else name for name in experiment.arms]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.16)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("generation in one iteration, seconds")
    return figure


def live(experiment: Experiment, colours: dict[str, str]) -> Figure | None:
    """Unfinished requests over time in one iteration, the same for every arm; triangles are switches."""
    chosen = typical_iteration(experiment.arms)
    if chosen is None:
        return None
    figure, axes = _figure(3.3)
    for name, arm in experiment.arms.items():
        curve = live_batch(arm.requests.filter(pl.col("iteration") == chosen))
        axes.step(curve["at_s"], curve["live"], where="post", color=colours[name], label=name)
        switches = live_switches(arm).filter(pl.col("iteration") == chosen)
        for i, switch in enumerate(switches.iter_rows(named=True)):
            at, unfinished = switch["at_s"], switch["unfinished"]
            axes.plot(at, unfinished, "v", color=colours[name], markeredgecolor="white", markersize=10, zorder=3)
            if i < MAX_LABELS:
                axes.annotate(
                    f"→tp{switch['tp_to']} at {unfinished}",
                    (at, unfinished),
                    (3, 6),
                    textcoords="offset points",
                    rotation=40,
                    color=colours[name],
                )
    axes.set(xlabel=f"seconds since the first request of iteration {chosen}", ylabel="unfinished requests")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def lengths(experiment: Experiment, colours: dict[str, str]) -> Figure:
    """Share of responses longer than a length, over the kept iterations, and the limit."""
    figure, axes = _figure(3.3)
    for (name, arm), width in zip(experiment.arms.items(), _nested_widths(experiment), strict=True):
        kept = kept_iterations(arm.iterations)["iteration"].to_list()
        tokens = arm.requests.filter(pl.col("iteration").is_in(kept))["response_tokens"]
        axes.ecdf(tokens, complementary=True, color=colours[name], linewidth=width, label=name)
    if cap := (experiment.config.get("rollout") or {}).get("max_response"):
        axes.axvline(cap, color="#1f2328", linewidth=1, linestyle=":")
        axes.annotate(
            f"limit {cap}",
            (cap, 1),
            (-4, -2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right",
            va="top",
        )
    axes.set(xlabel="response length, tokens", ylabel="share of responses longer", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.legend(loc="lower left")
    return figure


def iteration(experiment: Experiment) -> Figure:
    """Where the time of an iteration goes: means over the kept iterations, which add up as medians do not."""
    rows = {}
    for name, arm in experiment.arms.items():
        kept = kept_iterations(arm.iterations)
        parts = {part: kept[column].fill_null(0).mean() for part, column in PARTS.items()}
        parts["other"] = max(0.0, kept["iteration_s"].mean() - sum(parts.values()))
        rows[name] = parts
    return _stacked(rows, "mean seconds an iteration")


def savings(experiment: Experiment, colours: dict[str, str]) -> Figure | None:
    """Predicted against realised saving of each live switch that has both."""
    known = {}
    for name, arm in experiment.arms.items():
        pairs = live_switches(arm).drop_nulls(["predicted_saving_s", "realised_saving_s"])
        if len(pairs):
            known[name] = pairs
    if not known:
        return None
    figure, axes = _figure(3.3)
    for name, pairs in known.items():
        axes.plot(
            pairs["predicted_saving_s"],
            pairs["realised_saving_s"],
            "o",
            color=colours[name],
            label=name,
        )
    low = min(0.0, *axes.get_xlim(), *axes.get_ylim())
    high = max(0.0, *axes.get_xlim(), *axes.get_ylim())
    axes.plot([low, high], [low, high], color="#1f2328", linewidth=1, linestyle=":", label="as predicted")
    axes.axhline(0, color="#8a8f98", linewidth=1)
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="predicted saving, seconds", ylabel="realised saving, seconds")
    axes.legend()
    return figure


def switch_cost(experiment: Experiment) -> Figure | None:
    """Mean seconds of each phase of a live switch, by arm and direction."""
    rows = {}
    for name, arm in experiment.arms.items():
        groups = live_switches(arm).group_by("tp_from", "tp_to", maintain_order=True)
        for (tp_from, tp_to), switches in groups:
            label = f"{name}\ntp{tp_from}→tp{tp_to} (n={len(switches)})"
            rows[label] = {phase.removesuffix("_s"): switches[phase].mean() or 0.0 for phase in PHASES}
    return _stacked(rows, "mean seconds a switch") if rows else None


def reward(experiment: Experiment, colours: dict[str, str]) -> Figure:
    """Mean reward over all iterations, the warm-up included."""
    figure, axes = _figure(3.3)
    for (name, arm), width in zip(experiment.arms.items(), _nested_widths(experiment), strict=True):
        means = arm.iterations.select("iteration", "reward_mean")
        axes.plot(*means, marker="o", markersize=2.5 + width, linewidth=width, color=colours[name], label=name)
    axes.set(xlabel="iteration", ylabel="mean reward of the responses")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def _nested_widths(experiment: Experiment) -> np.ndarray:
    """Line widths, thick to thin: arms with equal values lie on top of each other and all stay visible."""
    return np.linspace(5.5, 1.6, len(experiment.arms)) if len(experiment.arms) > 1 else np.array([1.8])


def _stacked(rows: dict[str, dict[str, float]], label: str) -> Figure:
    """Horizontal bars, one a row, of parts that add up to a total. Parts that are 0 in all are left out."""
    figure, axes = _figure(1.5 + 0.5 * len(rows))
    starts = dict.fromkeys(rows, 0.0)
    for part, colour in zip(next(iter(rows.values())), PART_COLOURS, strict=False):
        widths = [parts[part] for parts in rows.values()]
        if not any(widths):
            continue
        axes.barh(list(rows), widths, left=list(starts.values()), height=0.62, color=colour, label=part)
        starts = {name: start + width for (name, start), width in zip(starts.items(), widths, strict=True)}
    for row, total in enumerate(starts.values()):
        axes.annotate(
            f"{number(total)} s", (total, row), (5, 0), textcoords="offset points", va="center", weight="bold"
        )
    axes.set_xlim(0, max(starts.values()) * 1.18 or 1)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label)
    figure.legend(loc="outside upper center", ncols=4, handlelength=1.0, columnspacing=1.2)
    return figure
