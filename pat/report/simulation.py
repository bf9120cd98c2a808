"""The simulated arms for the report: which are what, what pat gains over each, and the sentences. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pat.report import published
from pat.report.experiment import Experiment
from pat.report.setup import model_name
from pat.report.wording import EQUAL_PCT, answer, percent

STATIC = re.compile(r"tp\d+")
HINDSIGHT = ("oracle", "threshold-best")  # nobody can run these: they are chosen knowing the lengths
SINGLE_SWITCH = "threshold-best"
ABLATIONS = (
    (r"pat-one-switch", r"one switch at most"),
    (r"pat-no-rebalanc\w*", r"no rebalancing"),
    (r"pat-(recompute|migrate)-only", r"KV cache: \1 only"),
    (r"pat-lengths-x(.+)", r"lengths taken for \1 times as long"),
    (r"pat-(tp\d+)-latency-x(.+)", r"\1 taken for \2 times as slow"),
)


def statics(arms: Mapping[str, dict]) -> list[str]:
    """The static sizes, ascending."""
    return sorted(filter(STATIC.fullmatch, arms), key=lambda name: int(name[2:]))


def policies(arms: Mapping[str, dict]) -> list[str]:
    """The static sizes, then what chooses by itself, the oracle last; without the changed pats."""
    order = [*statics(arms), "threshold", "threshold-best", "pat", "oracle"]
    return [name for name in order if name in arms]


def runnable(name: str) -> bool:
    """Whether it is an arm that one could run as it is: not the oracle, not a changed pat."""
    return name not in HINDSIGHT and not name.startswith("pat-")


def ablations(arms: Mapping[str, dict]) -> list[str]:
    """pat with one part changed."""
    return [name for name in arms if name.startswith("pat-")]


def label(name: str, thresholds: Mapping[str, int] | None = None) -> str:
    """An arm in words."""
    if name in (thresholds or {}):
        hindsight = ", chosen in hindsight" if name in HINDSIGHT else ""
        return f"threshold at {thresholds[name]} unfinished{hindsight}"
    for pattern, words in ABLATIONS:
        if found := re.fullmatch(pattern, name):
            return found.expand(words)
    return "oracle (knows the lengths)" if name == "oracle" else name


def gains(arms: Mapping[str, dict], column: str, of: str = "pat") -> dict[str, float]:
    """Time that an arm saves over each static size, per cent of its time; empty without the arm."""
    mine = (arms.get(of) or {}).get(column)
    return {name: 100 * (1 - mine / arms[name][column]) for name in statics(arms)} if mine else {}


def simulated_answer(summary: dict) -> str:
    """The outcome of the simulation (simulate/summary.json) in one sentence."""
    references = {key: summary[key] for key in ("default", "worst_static", "best_static")}
    asked = {"arms": summary["arms"], "references": {"gen": references}, "gain_pct": {"gen": summary["gain_pct"]}}
    return answer(asked, "gen", "Simulated generation")


def limit(summary: dict) -> str:
    """How far pat is from the oracle in the simulation."""
    regret = summary["regret_pct"]["pat"]
    if regret < 0.05:
        return "In the simulation no schedule that knows the lengths is faster than pat."
    return (
        f"In the simulation pat takes {regret:.1f} % longer than the best schedule found knowing the lengths (oracle)."
    )


def beside_published(experiment: Experiment, measured: Mapping[str, dict]) -> list[dict]:
    """The published gains, each with the static size here over which the gain comes closest, and what remains.

    measured: the trained arms' medians. A row: result, applies, and for "simulated" and "measured" {policy, nearest,
    gain, reproduced, pat_nearest, pat_gain, best, remains}, or None where there is nothing to compare. The policy is
    pat; where no gain of pat is near the published one but one of a single switch is, that: PAT as published starts
    narrow and widens once.
    """
    simulated = experiment.simulated.summary["arms"] if experiment.simulated else {}
    system = (experiment.config.get("profile") or {}).get("system")
    rows = []
    for result in published.RESULTS:
        applies = published.applies(result, model_name(experiment), system)
        found = {
            "simulated": _against(result, simulated) if result.what == "gen" else None,
            "measured": _against(result, measured),
        }
        rows.append({"result": result, "applies": applies} | found)
    return rows


def _against(result: published.Published, arms: Mapping[str, dict]) -> dict | None:
    column = f"{result.what}_s"
    by_policy = {policy: gains(arms, column, policy) for policy in ("pat", SINGLE_SWITCH)}
    if not by_policy["pat"]:
        return None
    nearest = {policy: published.nearest(result, found) for policy, found in by_policy.items() if found}
    fitting = [policy for policy, (_, gain) in nearest.items() if published.reproduced(result, gain)]
    policy = fitting[0] if fitting else "pat"
    best = min(by_policy["pat"], key=by_policy["pat"].get)
    return {
        "policy": policy,
        "nearest": nearest[policy][0],
        "gain": nearest[policy][1],
        "reproduced": bool(fitting),
        "pat_nearest": nearest["pat"][0],
        "pat_gain": nearest["pat"][1],
        "best": best,
        "remains": by_policy["pat"][best],
    }


def published_sentences(rows: list[dict]) -> list[str]:
    """For each published gain that is of this model and machine: which baseline reproduces it, and what remains."""
    return [_sentence(row["result"], row["simulated"]) for row in rows if row["applies"] and row["simulated"]]


def _sentence(result: published.Published, found: dict) -> str:
    start = (
        f"PAT's authors report {result.gain_pct:g} % less generation time than verl for {result.model} on "
        f"{result.machine} ({result.max_response} tokens). Here, simulated, pat saves {found['pat_gain']:.1f} % over "
        f"static {found['pat_nearest']}"
    )
    if not found["reproduced"]:
        middle = ", which comes nearest: no static size reproduces it."
    elif found["policy"] == "pat":
        middle = ": that baseline reproduces the published gain."
    else:
        middle = (
            f", and a single switch from the narrowest size, at the best number of unfinished requests, "
            f"{found['gain']:.1f} % over static {found['nearest']}: that reproduces the published gain."
        )
    return f"{start}{middle} {remains(found)}"


def remains(found: dict) -> str:
    """What pat gains over the best static size."""
    gain, best = found["remains"], found["best"]
    if abs(gain) < EQUAL_PCT:
        return f"Over the best static size, {best}, next to nothing remains ({percent(gain)})."
    if gain > 0:
        return f"Over the best static size, {best}, {gain:.1f} % remain."
    return f"Against the best static size, {best}, nothing remains: pat takes {-gain:.1f} % more time."
