"""The sentences of the report. Each follows from the numbers alone, also where they speak against PAT."""

import polars as pl

from pat.report.experiment import Experiment

DASH = "\N{EN DASH}"
EQUAL_PCT = 1.0  # differences below this are called equal
DURATIONS = {"gen": "Generation", "iteration": "A whole iteration"}


def number(value: float | None) -> str:
    """About three significant digits; a dash for None."""
    if value is None:
        return DASH
    size = abs(value)
    if value == 0 or size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.2g}"


def count(value: float | None) -> str:
    """A number of things, or a median of such numbers; a dash for None."""
    return DASH if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def share(value: float | None) -> str:
    """A share 0..1 in per cent, without the sign; a dash for None."""
    return number(None if value is None else 100 * value)


def percent(value: float | None) -> str:
    """A signed percentage; a dash for None."""
    if value is None:
        return DASH
    rounded = round(value, 1) or 0.0  # no minus zero
    return f"{rounded:+.1f} %".replace("-", "\N{MINUS SIGN}") if rounded else "0.0 %"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as many of them as say something."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def answer(summary: dict, what: str = "gen", subject: str | None = None) -> str:
    """The outcome in one sentence. `what` is "gen" or "iteration"; `subject` is what takes the time."""
    subject = subject or DURATIONS[what]
    column = f"{what}_s"
    arms, references = summary["arms"], summary["references"][what]
    seconds = {name: f"{number(values[column])} s" for name, values in arms.items()}
    default, best = references["default"], references["best_static"]
    if "pat" not in arms:
        fastest = min(arms, key=lambda name: arms[name][column])
        listed = ", ".join(f"{name} {seconds[name]}" for name in arms)
        return f"{subject} was fastest with {fastest} ({listed}); the arm pat was not run."
    start = f"{subject} takes {seconds['pat']} with pat"
    if best is None:
        return f"{start}; no static size was run to compare it with."
    gains = summary["gain_pct"][what]
    if default == best:
        alone = references["worst_static"] == best
        role = "the only static size run" if alone else "which is both the default and the best static size"
        return f"{start}: {_versus(gains['best_static'])} {best} ({seconds[best]}), {role}."
    return (
        f"{start}: {_versus(gains['default'])} the default {default} ({seconds[default]}) "
        f"and {_versus(gains['best_static'])} the best static size {best} ({seconds[best]})."
    )


def _versus(gain: float) -> str:
    if abs(gain) < EQUAL_PCT:
        return f"within {EQUAL_PCT:g} % of"
    return f"{abs(gain):.1f} % {'less' if gain > 0 else 'more'} time than"


def verdict(fastest: dict, matched: float | None) -> str:
    """Which arm won (`pat.report.summary.fastest`), in a few words that stand by themselves.

    matched: share of responses that have a partner of equal length in every arm; None where nothing is to match.
    """
    unequal = " (unequal lengths)" if matched is not None and matched < 1 else ""
    return _verdict(fastest) + unequal


def _verdict(fastest: dict) -> str:
    arm, other = fastest["arm"], fastest["runner_up"]
    if other is None:
        return f"{arm}: {number(fastest['seconds'])} s"
    if fastest["lead_pct"] < EQUAL_PCT:
        return f"{arm} and {other} within {EQUAL_PCT:g} %"
    if not fastest["every"]:
        return f"not settled, {arm} or {other}"
    return f"{arm} fastest, {fastest['lead_pct']:.1f} % ahead of {other}"


def settled(summary: dict) -> str | None:
    """Whether PAT and the best static size come in the same order in every iteration (both had the same
    prompts in it). None where one of them was not run."""
    best = summary["references"]["gen"]["best_static"]
    if "pat" not in summary["arms"] or best is None:
        return None
    spread = summary["gain_spread_pct"]["gen"]["best_static"]
    if spread is None:
        return "A single iteration was compared: the spread is unknown and the order is not settled."
    if spread[0] > 0 or spread[1] < 0:
        order = "faster" if spread[0] > 0 else "slower"
        return f"Generation with pat was {order} than with {best} in every iteration."
    return (
        f"Generation with pat was faster than with {best} in some iterations and not in others: they do not "
        "settle which of the two is faster."
    )


def cautions(experiment: Experiment, summary: dict) -> list[str]:
    """What a reader must know before quoting the numbers."""
    if not experiment.arms:
        return _simulated_only(experiment)
    notes = [_warm_up(experiment, summary), _matched_lengths(summary)]
    counts = {name: len(kept) for name, kept in summary["kept_iterations"].items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in counts.items())
        notes.append(f"The arms ran unequal numbers of iterations ({listed}): their medians cover different prompts.")
    if len(experiment.arms) > 1:
        notes.append("The arms ran one after the other: what the machine did meanwhile is part of their difference.")
    notes.append(_wide_from_the_start(experiment, summary))
    if experiment.not_run:
        notes.append(f"Configured but not run: {', '.join(experiment.not_run)}.")
    if differing := _differing_settings(experiment):
        notes.append(f"The arms ran with different settings of: {', '.join(differing)}.")
    cut = {name: values["truncated_share"] for name, values in summary["arms"].items() if values["truncated_share"]}
    if cut:
        listed = ", ".join(f"{name} {100 * part:.0f} %" for name, part in cut.items())
        notes.append(f"Responses cut off by the length limit: {listed} (median share of an iteration).")
    if not any(node.get("devices") for node in experiment.hardware["nodes"]):
        notes.append("This machine has no accelerator: ranks are CPU processes. Nothing here was measured on a GPU.")
    return [note for note in notes if note]


def _simulated_only(experiment: Experiment) -> list[str]:
    """The same where nothing was trained."""
    summary, origin = experiment.simulated.summary, (experiment.profiled or {}).get("source")
    stage = summary["stage"]
    notes = [
        "Nothing was run on the machine that this is about: a generation stage was replayed from a model of its step "
        "times and switch costs. Scoring and the policy update are not in it.",
        f"Step times: {origin}." if origin else "",
        f"Medians of {count(stage['repeats'])} iterations, each with response lengths of its own; in each, all arms "
        "have the same.",
    ]
    return [note for note in notes if note]


def _wide_from_the_start(experiment: Experiment, summary: dict) -> str:
    """A note if pat did no more than take one size before any response had ended; else ""."""
    pat = experiment.arms.get("pat")
    if pat is None:
        return ""
    taken = set()
    for iteration in summary["kept_iterations"]["pat"]:
        live = pat.switches.filter((pl.col("iteration") == iteration) & (pl.col("unfinished") > 0))
        samples = pat.iterations.filter(pl.col("iteration") == iteration)["samples"].item()
        at_the_start = live.height == 1 and live["unfinished"].item() == samples
        taken.add(f"tp{live['tp_to'].item()}" if at_the_start else None)
    (size,) = taken if len(taken) == 1 else (None,)
    if size is None or size not in experiment.arms:
        return ""
    return (
        f"In every iteration counted, pat went to {size} before any response had ended, and stayed there. Apart from "
        f"the switch it did what the arm {size} does: their difference is mostly the machine's."
    )


def _differing_settings(experiment: Experiment) -> list[str]:
    configs = [arm.run["config"] for arm in experiment.arms.values()]
    return [
        key for key, value in experiment.config.items() if any(config.get(key, value) != value for config in configs)
    ]


def _warm_up(experiment: Experiment, summary: dict) -> str:
    alone = [name for name, arm in experiment.arms.items() if len(arm.iterations) == 1]
    counts = sorted({len(kept) for kept in summary["kept_iterations"].values()})
    if not alone:
        left_out = "The first iteration of each arm is warm-up and left out"
        if counts == [1]:
            return f"{left_out}: all numbers are of a single iteration."
        return (
            f"{left_out}; numbers are medians over the other {' or '.join(map(str, counts))} iterations, with "
            "minimum and maximum."
        )
    return (
        f"{', '.join(alone)} ran one iteration only, so it is kept although it includes the warm-up. "
        "Where an arm ran more, its first is left out."
    )


def _matched_lengths(summary: dict) -> str | None:
    matched = summary["matched"]
    if matched is None:
        return None if len(summary["arms"]) < 2 else "The arms share no iteration, so their lengths cannot be compared."
    if matched == 1:
        return "Matched lengths: in every iteration counted the arms generated the same response lengths."
    work = ", ".join(
        f"{name} {count(values['tokens'])} / {count(values['response_len_max'])}"
        for name, values in summary["arms"].items()
    )
    return (
        f"Lengths are not matched: {100 * matched:.0f} % of the responses have a partner of equal length in "
        "every arm. Part of any difference in time is a difference in work (median tokens an iteration / "
        f"longest response: {work}); compare tokens a second too."
    )
