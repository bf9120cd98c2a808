"""What the run that compares the arms says: numbers, a table, and which arm won (pure)."""

from __future__ import annotations

from typing import NamedTuple

from pat.report.wording import number, percent

COLUMNS = {  # of the summary: name as a metric, and head in the table
    "gen_s": ("gen_seconds", "Generation, s"),
    "iteration_s": ("iteration_seconds", "Iteration, s"),
    "tokens_per_s": ("tokens_per_s", "Tokens/s"),
    "switches": (None, "Switches"),
    "reward_mean": (None, "Reward"),
}
REFERENCES = {"default": "the default", "worst_static": "the worst static", "best_static": "the best static"}


class Overview(NamedTuple):
    """`note` (Markdown) for the run, `remark` for the experiment."""

    metrics: dict[str, float | None]
    params: dict[str, object]
    fastest: str
    note: str
    remark: str


def overview(summary: dict) -> Overview:
    """From report/summary.json."""
    arms, simulated = summary["arms"], summary["simulated"]
    fastest = summary["fastest"] or simulated["fastest"]
    metrics = {
        f"overview/{key}.{arm}": values[column]
        for column, (key, _) in COLUMNS.items()
        if key
        for arm, values in arms.items()
    }
    for what, gains in summary["gain_pct"].items():
        metrics |= {f"overview/pat_saves_{what}_pct.over_{reference}": gain for reference, gain in gains.items()}
    if simulated:
        metrics |= {f"overview/simulated_gen_seconds.{arm}": value for arm, value in simulated["gen_s"].items()}
    metrics |= {f"predictor/{part}_error_pct": error for part, error in summary["predictor_error_pct"].items()}
    metrics["overview/matched_lengths_share"] = summary["matched"]
    sentences = [text for text in summary["answer"].values() if text]
    table = _trained(arms, fastest["arm"]) if arms else _simulated(simulated, fastest["arm"])
    return Overview(
        metrics=metrics,
        params={
            "fastest": fastest["arm"],
            "verdict": summary["verdict"],
            "references": summary["references"] if arms else {key: simulated[key] for key in REFERENCES},
        },
        fastest=fastest["arm"],
        note="\n\n".join([f"**{summary['verdict']}**", *sentences, table, *_gains(summary)]),
        remark="\n\n".join([f"**{summary['verdict']}**", *sentences]),
    )


def _trained(arms: dict, fastest: str) -> str:
    rows = [[name, *(number(values[column]) for column in COLUMNS)] for name, values in arms.items()]
    return _table(["Arm, medians", *(head for _, head in COLUMNS.values())], rows, fastest)


def _simulated(simulated: dict, fastest: str) -> str:
    rows = [
        [name, number(seconds), number(simulated["regret_pct"][name])] for name, seconds in simulated["gen_s"].items()
    ]
    return _table(["Policy, simulated", "Generation, s", "Longer than the oracle, %"], rows, fastest)


def _table(head: list[str], rows: list[list[str]], fastest: str) -> str:
    """A Markdown table; the row of `fastest` is bold."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    lines += [[f"**{cell}**" for cell in row] if row[0] == fastest else row for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _gains(summary: dict) -> list[str]:
    gains = summary["gain_pct"]["gen"] if summary["arms"] else summary["simulated"]["gain_pct"]
    known = [f"{percent(gains[key])} over {words}" for key, words in REFERENCES.items() if gains.get(key) is not None]
    return [f"Generation time that pat saves: {', '.join(known)}."] if known else []
