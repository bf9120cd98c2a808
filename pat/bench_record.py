"""rollout.json as it grows, repeat by repeat; read again by a bench that goes on where an earlier one ended."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import polars as pl

from pat import provenance
from pat.resume import differences
from pat.workload import Replay


class Record:
    """``rollout.json``, ``rollout.html`` and ``steps.parquet`` in one folder.

    {"about": {..}, "workloads": {NAME: {
        "about", "lengths", "prompt_tokens",
        "arms": {ARM: {"gen_s": [..], "median", "switches": [[[from, to, unfinished], ..], ..], "switch_s": [..],
                       "decisions": [..], "decision_s": [..], "predicted_s": [..],
                       "pace": [{TP: realised over predicted decode time, just before}, ..]}},
        "predicted_s": {ARM: median over the repeats}, "oracle_s": best schedule found in the simulator}}}
    Times are seconds; lists have an entry a repeat.
    """

    def __init__(self, out: Path, same: dict, about: dict) -> None:
        """same: fingerprint; results with another one are not continued, but replaced. about: what the page tells."""
        self.out, self.same, self.about = out, same, about
        self.workloads: dict[str, dict] = {}
        self.steps: list[pl.DataFrame] = []
        out.mkdir(parents=True, exist_ok=True)
        path = out / "rollout.json"
        if not path.exists():
            return
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            changed = differences(earlier["about"]["same"], same)
        except (ValueError, KeyError, TypeError):
            print(f"bench: {path} cannot be continued, and is replaced", flush=True)
            return
        if changed:
            print(f"bench: {path} has another {', '.join(changed)}: not continued, but replaced", flush=True)
            return
        self.workloads = earlier["workloads"]
        if (out / "steps.parquet").exists():
            self.steps.append(pl.read_parquet(out / "steps.parquet"))

    def add(self, replay: Replay, arms: list[str]) -> int:
        """Make a place for the workload; returns the repeats that an earlier bench has left of it."""
        new = {
            "about": replay.about,
            "lengths": replay.lengths,
            "prompt_tokens": [len(prompt) for prompt in replay.prompts],
        }
        known = self.workloads.get(replay.name)
        if known and all(known[key] == value for key, value in new.items()) and list(known["arms"]) == arms:
            return min(len(arm["gen_s"]) for arm in known["arms"].values())
        self.workloads[replay.name] = new | {"arms": {name: {} for name in arms}, "predicted_s": {}, "oracle_s": None}
        self.steps = [part.filter(pl.col("workload") != replay.name) for part in self.steps]
        return 0

    def keep(self, name: str, repeat: dict) -> None:
        """Add a repeat, as `Bench.run` returns it."""
        workload = self.workloads[name]
        for arm, kept in workload["arms"].items():
            for key, value in (repeat["arms"][arm] | {"predicted_s": repeat["predicted"][arm]}).items():
                kept.setdefault(key, []).append(value)
            kept["median"] = statistics.median(kept["gen_s"])
            workload["predicted_s"][arm] = statistics.median(kept["predicted_s"])
        workload["oracle_s"] = min(filter(None, (workload["oracle_s"], repeat["oracle_s"])))
        self.steps.append(repeat["steps"])

    def write(self) -> None:
        from pat.report.bench import page

        measured = {name: w for name, w in self.workloads.items() if w["predicted_s"]}
        about = self.about | provenance.facts() | {"same": self.same}
        document = {"about": about, "workloads": measured}
        for name, text in (("rollout.json", json.dumps(document, indent=1) + "\n"), ("rollout.html", page(document))):
            partial = self.out / f"{name}.part"
            partial.write_text(text, encoding="utf-8")
            partial.rename(self.out / name)
        if self.steps:
            self.steps = [pl.concat(self.steps)]
            self.steps[0].write_parquet(self.out / "steps.parquet.part")
            (self.out / "steps.parquet.part").rename(self.out / "steps.parquet")
