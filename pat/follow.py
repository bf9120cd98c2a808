"""Shows trainings in MLflow while they run: `python -m pat.follow TARGETS`, which starts and ends with Snakemake.

It runs where Snakemake does and reads what verl writes for each iteration, on a cluster through the shared file system.
So a job never waits for a tracker, and an SQLite file is only written from one machine, by whoever holds its lock. The
rule `track` puts the complete run in the place of the one that is shown meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pat import owner
from pat.rl import processes
from pat.rl.verl_log import verl_lines

PERIOD_S = 5.0  # between two looks at the files
NICE = 10  # trainings on this machine are timed; with 19 loading MLflow beside one would take minutes


class Shown:
    """A training that is shown: its run, the iterations that it has, and when verl's file was read."""

    def __init__(self, run_id: str) -> None:
        self.run_id, self.steps, self.read = run_id, 0, 0


class Follower:
    """Follows the trainings of several experiments. targets: where each is logged, see `pat.tracking.Target`."""

    def __init__(self, results: Path, targets: Mapping[str, Any]) -> None:
        self.results, self.targets = results, targets
        self.shown: dict[tuple[str, str], Shown] = {}

    def look(self) -> None:
        """Log what is new of the trainings that run, and end the runs of those that do no more."""
        running = set()
        for name in self.targets:
            for stage in owner.made_now(self.results / name):
                if stage.startswith("train-"):
                    running.add((name, stage))
                    self._advance(name, stage)
        for key in self.shown.keys() - running:
            self.end(*key, status="FINISHED")

    def _advance(self, name: str, stage: str) -> None:
        out = self.results / name / "train" / stage.removeprefix("train-")
        try:
            changed = (out / "verl.jsonl").stat().st_mtime_ns
        except OSError:
            return  # it has only begun
        shown = self.shown.get((name, stage))
        if shown and shown.read == changed:
            return
        from pat import facts_verl, tracking

        lines = verl_lines(out)
        with tracking.opened(self.targets[name].uri, name) as (client, experiment):
            if shown is None or len(lines) < shown.steps:  # else a training that began again
                shown = self.shown[name, stage] = Shown(tracking.show(client, experiment, stage))
            now = int(1000 * time.time())
            for line in lines[shown.steps :]:
                points = [(*pair, now, line["step"]) for pair in facts_verl.live(line["data"])]
                client.log_batch(shown.run_id, [tracking.Metric(*point) for point in points])
        shown.steps, shown.read = len(lines), changed

    def end(self, name: str, stage: str, status: str) -> None:
        """Say of a run that nothing more comes. Where it is complete by now, it is gone."""
        from pat import tracking

        shown = self.shown.pop((name, stage))
        with tracking.opened(self.targets[name].uri, name) as (client, _):
            if client.get_run(shown.run_id).info.lifecycle_stage == "active":
                client.set_terminated(shown.run_id, status)


def main() -> None:
    """TARGETS: JSON, {experiment: {"uri": ...}}. The variable MLFLOW_TRACKING_URI goes before it."""
    processes.exit_on_sigterm()
    os.nice(NICE)
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    targets = {name: SimpleNamespace(uri=uri or each["uri"]) for name, each in json.loads(sys.argv[1]).items()}
    follower, told = Follower(Path("results"), targets), ""
    try:
        while True:
            try:
                follower.look()
            except Exception as error:  # whatever a tracker has: the training and its files do not depend on it
                if told != (told := f"{type(error).__name__}: {error}"):
                    print(f"running trainings are not shown for now: {told}", flush=True)
            time.sleep(PERIOD_S)
    finally:
        for key in list(follower.shown):
            follower.end(*key, status="KILLED")


if __name__ == "__main__":
    main()
