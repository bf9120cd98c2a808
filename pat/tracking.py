"""Logs a finished stage to MLflow (written for 3.17) as a run of its own; nothing else knows MLflow.

Stages write files and never wait for a tracker: this reads the files afterwards.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from filelock import FileLock

from pat import facts as stage_facts
from pat.facts import DataSet, Facts
from pat.provenance import git_sha

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read on import; many clusters have no way out
from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LifecycleStage,
    Metric,
    Param,
)

SQLITE = "sqlite:///"
MAX_METRICS, MAX_PARAMS, MAX_PARAM_LENGTH = 1000, 100, 6000  # MLflow's limits of a request and of a value


class Target(Protocol):
    """Where to log: the tracking database or server, and the folder for files (a server has its own)."""

    uri: str
    artifacts: str


def run(experiment_dir: Path, stage: str, cfg: Target, params: dict, out: Path) -> None:
    """Logs what `stage` left in results/EXPERIMENT as the run `stage` of the MLflow experiment EXPERIMENT.

    `params` are the settings the stage ran with. The run replaces the stage's earlier ones once it is
    complete: an error leaves no half a run, and the earlier one where it was. `out` is the JSON file that
    says which run it is: run_id, experiment_id, uri. FileNotFoundError: the stage has not finished.
    ValueError: no such stage, or a `uri` that MLflow cannot write to.
    """
    experiment_dir, out = Path(experiment_dir), Path(out)
    files = stage_facts.stage_files(experiment_dir, stage)
    facts = stage_facts.collect(experiment_dir, stage)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with _only_writer(cfg.uri):
        client = MlflowClient(tracking_uri=_absolute(cfg.uri))
        experiment_id = _experiment(client, experiment_dir.resolve().name, cfg)
        run_id = _log(client, experiment_id, experiment_dir, stage, facts, files, params)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"run_id": run_id, "experiment_id": experiment_id, "uri": cfg.uri}, indent=2) + "\n")
    print(f"tracked {stage} of {experiment_dir.resolve().name} as MLflow run {run_id}")


def _only_writer(uri: str) -> AbstractContextManager:
    """One writer at a time to an SQLite file: of 8 processes that set up an empty one together, 7 failed."""
    if not uri.startswith(SQLITE):
        if "://" not in uri or uri.startswith("file:"):
            raise ValueError(
                f"tracking.uri: {uri!r} is a folder, which MLflow no longer writes to; "
                f"allowed: {SQLITE}FILE or a server's URL"
            )
        return nullcontext()
    database = Path(uri.removeprefix(SQLITE))
    database.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{database}.lock")


def _absolute(uri: str) -> str:
    return f"{SQLITE}{Path(uri.removeprefix(SQLITE)).resolve()}" if uri.startswith(SQLITE) else uri


def _experiment(client: MlflowClient, name: str, cfg: Target) -> str:
    """The id of the experiment `name`, which is made, or taken out of MLflow's trash, where needed."""
    found = client.get_experiment_by_name(name)
    if found is None:
        local = cfg.uri.startswith(SQLITE)
        files = (Path(cfg.artifacts).resolve() / name).as_uri() if local else None
        return client.create_experiment(name, artifact_location=files)
    if found.lifecycle_stage == LifecycleStage.DELETED:
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


def _log(
    client: MlflowClient,
    experiment_id: str,
    experiment_dir: Path,
    stage: str,
    facts: Facts,
    files: list[Path],
    params: dict,
) -> str:
    """Writes the run and removes those it replaces; returns its id. The run's times are the stage's own."""
    end_ms = int(1000 * max(path.stat().st_mtime for path in files))
    seconds = next((value for name, value, _ in facts.metrics if name == "stage/seconds"), 0.0)
    run_id = client.create_run(experiment_id, int(end_ms - 1000 * seconds), _tags(stage, facts), stage).info.run_id
    try:
        settings = dict(stage_facts.flatten(params)) | dict(stage_facts.flatten(facts.params))
        for some in _chunks(list(settings.items()), MAX_PARAMS):
            client.log_batch(run_id, params=[Param(key, value[:MAX_PARAM_LENGTH]) for key, value in some])
        for some in _chunks(facts.metrics, MAX_METRICS):
            client.log_batch(run_id, [Metric(name, value, end_ms, step) for name, value, step in some])
        client.log_inputs(run_id, [_dataset(data) for data in facts.data])
        for path in files:
            folder = path.parent.relative_to(experiment_dir)
            client.log_artifact(run_id, str(path), None if folder == Path(".") else folder.as_posix())
        client.set_terminated(run_id, "FINISHED", end_ms)
    except BaseException:  # an interrupt too: a run that says RUNNING for ever misleads
        client.set_terminated(run_id, "FAILED")
        client.delete_run(run_id)
        raise
    for earlier in client.search_runs([experiment_id], f"tags.`pat.stage` = '{stage}'"):
        if earlier.info.run_id != run_id:
            client.delete_run(earlier.info.run_id)
    if facts.remark:
        client.set_experiment_tag(experiment_id, "mlflow.note.content", facts.remark)
    return run_id


def _tags(stage: str, facts: Facts) -> dict[str, str]:
    tags = {"pat.stage": stage, "mlflow.source.name": f"pat {stage}"} | facts.tags
    if (commit := tags.get("pat.git") or git_sha()) is not None:
        tags |= {"pat.git": commit, "mlflow.source.git.commit": commit}
    return tags


def _dataset(data: DataSet) -> DatasetInput:
    """MLflow's own record of a data set; its constructors know no Parquet file that is not a pandas frame."""
    dataset = Dataset(
        name=data.name,
        digest=data.digest,
        source_type="local",
        source=json.dumps({"uri": data.path}),
        profile=json.dumps({"num_rows": data.rows}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", data.split)])


def _chunks(items: Sequence, size: int) -> Iterator[Sequence]:
    return (items[start : start + size] for start in range(0, len(items), size))
