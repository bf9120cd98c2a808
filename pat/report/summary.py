"""The numbers of the report: arms side by side, gains of PAT, matched lengths. Pure: frames in, numbers out.

The first iteration of an arm is dropped as warm-up, unless it is the only one, and so is the first after each start of
a training that was interrupted. Every number of an arm is a median over the iterations kept; the spread is their
minimum and maximum.
"""

from collections import Counter
from collections.abc import Mapping

import polars as pl

from pat.predictor.calibration import calibrate, gap
from pat.report import simulation
from pat.report.experiment import Arm, Experiment

METRICS = {
    "gen_s": pl.col("gen_s"),
    "iteration_s": pl.col("iteration_s"),
    "tokens_per_s": pl.col("tokens") / pl.col("gen_s"),
    "tokens": pl.col("tokens"),
    "samples": pl.col("samples"),
    "switches": pl.col("switches"),
    "switch_s": pl.col("switch_s"),
    "tail_share": pl.col("tail_s") / pl.col("gen_s"),
    "reward_mean": pl.col("reward_mean"),
    "old_log_prob_s": pl.col("old_log_prob_s"),
    "update_s": pl.col("update_s"),
    "weight_sync_s": pl.col("weight_sync_s"),
    "response_len_mean": pl.col("response_len_mean"),
    "response_len_max": pl.col("response_len_max"),
    "truncated_share": pl.col("truncated") / pl.col("samples"),
}
COMPARED = {"gen": "gen_s", "iteration": "iteration_s"}


def summarise(experiment: Experiment) -> dict:
    """The content of report/summary.json. Times in seconds, gains and errors in per cent, shares in 0..1.

    A gain is 100 * (1 - PAT / reference): positive where PAT takes less time. A number is None where what it
    needs was not run; a spread is None with a single iteration.
    """
    kept = {name: kept_iterations(arm.iterations) for name, arm in experiment.arms.items()}
    references = {what: _references(experiment.statics, kept, column) for what, column in COMPARED.items()}
    simulated = experiment.simulated.summary if experiment.simulated else None
    return {
        "nodes": max((arm.run.get("nodes", 1) for arm in experiment.arms.values()), default=1),
        "arms": {name: medians(frame) for name, frame in kept.items()},
        "fastest": fastest({name: frame.select(key="iteration", seconds="gen_s") for name, frame in kept.items()}),
        "spread": {name: _spread(frame) for name, frame in kept.items()},
        "references": references,
        "gain_pct": {
            what: _gains(kept, references[what], column) | {"oracle": _oracle_gain(simulated, column)}
            for what, column in COMPARED.items()
        },
        "gain_spread_pct": {what: _gain_spreads(kept, references[what], column) for what, column in COMPARED.items()},
        "predictor_error_pct": {
            part: _mean_error((experiment.predictor_errors or {}).get(part)) for part in ("decode", "prefill", "switch")
        },
        "kept_iterations": {name: frame["iteration"].to_list() for name, frame in kept.items()},
        **_matched(experiment.arms, kept),
        "simulated": _simulated(experiment),
        "calibration": _calibration(experiment),
    }


def fastest(seconds: Mapping[str, pl.DataFrame]) -> dict | None:
    """The arm with the lowest median, and whether that is settled. None without arms.

    seconds: by arm, rows (key, seconds); equal keys are the same work. {"arm", "seconds", "runner_up", "lead_pct",
    "every": whether it beat the next arm each time both did the same work, at least twice}; None where there is
    no second arm.
    """
    middle = {name: frame["seconds"].median() for name, frame in seconds.items()}
    if not middle:
        return None
    first, *others = sorted(middle, key=middle.get)
    if not others:
        return {"arm": first, "seconds": middle[first], "runner_up": None, "lead_pct": None, "every": None}
    pairs = seconds[first].join(seconds[others[0]], on="key", suffix="_next")
    return {
        "arm": first,
        "seconds": middle[first],
        "runner_up": others[0],
        "lead_pct": gain_pct(middle[first], middle[others[0]]),
        "every": len(pairs) > 1 and bool((pairs["seconds"] < pairs["seconds_next"]).all()),
    }


def calibration(experiment: Experiment) -> pl.DataFrame:
    """Rows (iteration, tokens, predicted, observed, responses) of the length model, learnt as pat learns it.

    From the responses of the last arm (pat, where it ran); empty where only one iteration was run, or none.
    """
    rollout = experiment.config.get("rollout") or {}
    arm = list(experiment.arms.values())[-1] if experiment.arms else None
    cap = rollout.get("max_response")
    if arm is None or cap is None:
        return pl.DataFrame(schema={"responses": pl.Int64})
    # Replayed lengths end by a limit of their own; only the common one cuts.
    reason = pl.when(pl.col("response_tokens") < cap).then(pl.lit("stop")).otherwise(pl.lit("length"))
    return calibrate(arm.requests.select("iteration", "response_tokens", finish_reason=reason), cap)


def _calibration(experiment: Experiment) -> dict | None:
    """Mean and largest difference of predicted and observed shares of unfinished responses, in 0..1."""
    rows = calibration(experiment)
    found = gap(rows)
    if found is None:
        return None
    counted = rows.group_by("iteration").agg(pl.col("responses").first())["responses"].sum()
    return {"mean": found.mean, "largest": found.largest, "responses": counted}


def _simulated(experiment: Experiment) -> dict | None:
    """What the page says of the simulation; the whole is in simulate/summary.json."""
    if experiment.simulated is None:
        return None
    summary, rows = experiment.simulated.summary, experiment.simulated.rows
    runnable = [name for name in summary["arms"] if simulation.runnable(name)]
    seconds = {name: rows.filter(arm=name).select(key="repeat", seconds="gen_s") for name in runnable}
    return {key: summary[key] for key in ("default", "worst_static", "best_static", "gain_pct")} | {
        "gen_s": {name: values["gen_s"] for name, values in summary["arms"].items()},
        "regret_pct": summary["regret_pct"],
        "fastest": fastest(seconds),
    }


def kept_iterations(iterations: pl.DataFrame) -> pl.DataFrame:
    """The iterations that count: all but the first after each start (cold caches), or all where none other is left."""
    warm = iterations.filter(~pl.col("warm_up"))
    return iterations if warm.is_empty() else warm


def medians(kept: pl.DataFrame) -> dict[str, float | None]:
    """The median of every metric, how many iterations it is of, and the largest probability difference."""
    return kept.select(expression.median().alias(name) for name, expression in METRICS.items()).row(0, named=True) | {
        "prob_diff_max": kept["prob_diff_max"].max(),
        "iterations": len(kept),
    }


def live_batch(requests: pl.DataFrame) -> pl.DataFrame:
    """Unfinished requests of one iteration over time: columns at_s and live, one row each time it changes."""
    changes = pl.concat(
        [
            requests.select(at_s="arrive_s", change=pl.lit(1)),
            requests.select(at_s="finish_s", change=pl.lit(-1)),
        ]
    )
    return (
        changes.group_by("at_s")
        .agg(pl.col("change").sum())
        .sort("at_s")
        .select("at_s", live=pl.col("change").cum_sum())
    )


def live_switches(arm: Arm) -> pl.DataFrame:
    """The switches of the kept iterations that were made while requests were unfinished."""
    kept = kept_iterations(arm.iterations)["iteration"].to_list()
    return arm.switches.filter(pl.col("iteration").is_in(kept) & (pl.col("unfinished") > 0)).sort("iteration", "switch")


def typical_iteration(arms: Mapping[str, Arm]) -> int | None:
    """The iteration to draw for all arms: the (lower) median by generation time of the last arm, which is
    `pat` where it ran, among the kept iterations that all arms have. None where they share none."""
    shared = _shared({name: kept_iterations(arm.iterations) for name, arm in arms.items()})
    last = list(arms.values())[-1].iterations.filter(pl.col("iteration").is_in(shared)).sort("gen_s")
    return last["iteration"][(len(last) - 1) // 2] if len(last) else None


def _shared(kept: Mapping[str, pl.DataFrame]) -> list[int]:
    return sorted(set.intersection(*(set(frame["iteration"]) for frame in kept.values())))


def _spread(kept: pl.DataFrame) -> dict[str, list[float | None]] | None:
    if len(kept) < 2:
        return None
    values = kept.select(**METRICS)
    return {name: [values[name].min(), values[name].max()] for name in METRICS}


def _references(statics: list[Arm], kept: Mapping[str, pl.DataFrame], column: str) -> dict[str, str | None]:
    """The arms that PAT is held against. The default is the lowest tp, which frameworks are started with."""
    if not statics:
        return {"default": None, "worst_static": None, "best_static": None}
    by_time = sorted(statics, key=lambda arm: kept[arm.name][column].median())
    return {"default": statics[0].name, "worst_static": by_time[-1].name, "best_static": by_time[0].name}


def _gains(kept: Mapping[str, pl.DataFrame], references: dict, column: str) -> dict[str, float | None]:
    return {
        role: gain_pct(kept["pat"][column].median(), kept[arm][column].median()) if arm and "pat" in kept else None
        for role, arm in references.items()
    }


def _gain_spreads(kept: Mapping[str, pl.DataFrame], references: dict, column: str) -> dict[str, list[float] | None]:
    """Least and greatest gain, iteration by iteration: both arms had the same prompts in it."""
    spreads = dict.fromkeys(references)
    for role, arm in references.items():
        if arm and "pat" in kept:
            pairs = kept["pat"].join(kept[arm], on="iteration", suffix="_reference")
            gains = [gain_pct(*pair) for pair in pairs.select(column, f"{column}_reference").rows()]
            spreads[role] = [min(gains), max(gains)] if len(gains) > 1 else None
    return spreads


def gain_pct(pat_s: float, reference_s: float) -> float:
    """Time saved by PAT as a share of the reference's time, per cent."""
    return 100 * (1 - pat_s / reference_s)


def _oracle_gain(simulated: dict | None, column: str) -> float | None:
    """PAT against the oracle, both simulated: at most 0, and -x means that x % is left to gain."""
    arms = (simulated or {}).get("arms", {})
    pat, oracle = (arms.get(name, {}).get(column) for name in ("pat", "oracle"))
    return gain_pct(pat, oracle) if pat and oracle else None


def _mean_error(by_layout: dict | None) -> float | None:
    """Mean of the layouts' median absolute errors, weighted by how many held-out shapes each has."""
    layouts = [layout for layout in (by_layout or {}).values() if layout["n"]]
    shapes = sum(layout["n"] for layout in layouts)
    return sum(layout["median_abs_pct"] * layout["n"] for layout in layouts) / shapes if layouts else None


def _matched(arms: Mapping[str, Arm], kept: Mapping[str, pl.DataFrame]) -> dict:
    """Whether the arms generated the same lengths, over the kept iterations that all of them have.

    `matched` is the share of responses that have a partner of equal length in every arm, `matched_iterations`
    those in which all do. Arms that generate different lengths do different work: their times do not compare.
    """
    shared = _shared(kept) if len(arms) > 1 else []
    if not shared:
        return {"matched": None, "matched_iterations": []}
    common = total = 0
    equal = []
    for iteration in shared:
        lengths = [
            Counter(arm.requests.filter(pl.col("iteration") == iteration)["response_tokens"].to_list())
            for arm in arms.values()
        ]
        smallest, largest = lengths[0], lengths[0]
        for counts in lengths[1:]:
            smallest, largest = smallest & counts, largest if largest.total() >= counts.total() else counts
        common += smallest.total()
        total += largest.total()
        if smallest == largest:
            equal.append(iteration)
    return {"matched": common / total if total else None, "matched_iterations": equal}
