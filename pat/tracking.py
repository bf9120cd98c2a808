"""Logs a finished stage to MLflow (written for 3.17) as a run of its own; nothing else knows MLflow.

Stages write files and never wait for a tracker: this reads the files afterwards. By default one process at a time
writes to an SQLite file. With MLFLOW_TRACKING_URI set to an MLflow server any number may write to that.
"""

import getpass
import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from filelock import FileLock

from pat import facts as stage_facts
from pat import mlflow_limits as limits
from pat import provenance
from pat.facts import DataSet, Facts, Measurement

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read on import; many clusters have no way out
# A server that is away is told within half a minute, one that takes requests and says nothing within three.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
from mlflow import MlflowClient
from mlflow.entities import DatasetInput, InputTag, LifecycleStage, Metric, Param, Run
from mlflow.exceptions import MlflowException, RestException

from pat.tracking_files import SCHEME, Files

SQLITE = "sqlite:///"
SERVER = ("http://", "https://")
VARIABLE = "MLFLOW_TRACKING_URI"
MAX_DIFF = 1_000_000  # characters of uncommitted changes that are kept
CURRENT, LIVE, SUPERSEDED_BY = "pat.current", "pat.live", "pat.superseded_by"  # tags; the first two "yes" or "no"
FADED = "#c4c4c4"  # colour of superseded runs in charts


class TrackingError(RuntimeError):
    """MLflow's server cannot be reached or refuses to talk."""


class Target(Protocol):
    """Where to log: the tracking database or server, and the folder for files (a server has its own)."""

    uri: str
    artifacts: str


def run(experiment_dir: Path, stage: str, cfg: Target, params: dict, out: Path) -> None:
    """Logs what `stage` left in results/EXPERIMENT as a run of the MLflow experiment EXPERIMENT.

    `params` are the settings the stage ran with. The variable MLFLOW_TRACKING_URI, where set, goes before `cfg.uri`.
    Once it is complete it is the stage's current run: earlier ones stay, marked as superseded (`supersede`). An error
    leaves no half a run, and the earlier one as it was. `out` is the JSON file that says which run it is: run_id,
    experiment_id, uri. FileNotFoundError: the stage has not finished. ValueError: no such stage, or a `uri` that MLflow
    cannot write to. TrackingError: the server is away.
    """
    experiment_dir, out = Path(experiment_dir), Path(out)
    uri = os.environ.get(VARIABLE) or cfg.uri
    files = stage_facts.stage_files(experiment_dir, stage)
    facts = stage_facts.collect(experiment_dir, stage)
    root = Path(cfg.artifacts) if uri.startswith(SQLITE) else None
    try:
        with opened(uri, experiment_dir.resolve().name) as (client, experiment_id):
            run_id = _log(client, experiment_id, experiment_dir, stage, facts, files, params, root)
    except (MlflowException, OSError) as error:
        if not uri.startswith(SERVER) or isinstance(error, RestException):
            raise
        raise TrackingError(_away(uri, experiment_dir, error)) from None
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"run_id": run_id, "experiment_id": experiment_id, "uri": uri}, indent=2) + "\n", encoding="utf-8"
    )
    page = f", {uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}" if uri.startswith(SERVER) else ""
    print(f"tracked {stage} of {experiment_dir.resolve().name} as MLflow run {run_id}{page}")


@contextmanager
def opened(uri: str, name: str) -> Iterator[tuple[MlflowClient, str]]:
    """A client that may write to ``uri`` during the block, and the id of the experiment ``name``, made if need be."""
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with _only_writer(uri):
        client = MlflowClient(tracking_uri=_absolute(uri))
        experiment_id = _experiment(client, name, uri)
        client.set_experiment_tag(experiment_id, "mlflow.experimentKind", "custom_model_development")
        yield client, experiment_id


def _away(uri: str, experiment_dir: Path, error: Exception) -> str:
    reason = " ".join(str(error).split())
    return (
        f"MLflow's server {uri} could not be used: {reason[:300]}. The results are all in {experiment_dir}: run the "
        f"same command again when it answers, or without the variable {VARIABLE} to log to tracking.uri instead."
    )


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


def _experiment(client: MlflowClient, name: str, uri: str) -> str:
    """The id of the experiment `name`, which is made, or taken out of MLflow's trash, where needed."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(
                name, artifact_location=f"{SCHEME}{name}" if uri.startswith(SQLITE) else None
            )
        except MlflowException as error:
            found = client.get_experiment_by_name(name)  # another writer to the server was quicker
            if error.error_code != "RESOURCE_ALREADY_EXISTS" or found is None:
                raise
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
    root: Path | None,
) -> str:
    """Writes the run and supersedes earlier ones; returns its id. The run's times are the stage's own.

    root: see `Files`.
    """
    end_ms = int(1000 * max(path.stat().st_mtime for path in files))
    seconds = next((each.value for each in facts.metrics if each.name == "stage/seconds"), 0.0)
    name = limits.shortened(facts.name or stage, limits.RUN)
    run = client.create_run(experiment_id, int(end_ms - 1000 * seconds), _tags(stage, facts), name)
    run_id, kept = run.info.run_id, Files(client, run, root)
    try:
        settings = dict(stage_facts.flatten(params)) | dict(stage_facts.flatten(facts.params))
        for some in _chunks(list(limits.names(settings.items()).items()), limits.PARAMS):
            client.log_batch(run_id, params=[Param(key, value) for key, value in some])
        for some in _chunks(facts.metrics, limits.METRICS):
            client.log_batch(run_id, [_metric(each, end_ms) for each in some])
        if facts.data:
            client.log_inputs(run_id, [_dataset(data) for data in facts.data])
        for path in files:
            folder = path.parent.relative_to(experiment_dir)
            kept.add(path, None if folder == Path(".") else folder.as_posix())
        _log_origin(kept, facts)
        if facts.note:
            note = limits.lines(_note(facts, run_id, experiment_dir), limits.TAG)
            client.set_tag(run_id, "mlflow.note.content", note)
        client.set_terminated(run_id, "FINISHED", end_ms)
    except BaseException:  # an interrupt too: a run that says RUNNING for ever misleads
        with suppress(Exception):  # the server may be what failed; the next run of the stage replaces this one
            client.set_terminated(run_id, "FAILED")
            client.delete_run(run_id)
        raise
    supersede(client, client.get_run(run_id))
    if facts.remark:
        remark = limits.lines(facts.remark, limits.EXPERIMENT_TAG)
        client.set_experiment_tag(experiment_id, "mlflow.note.content", remark)
    return run_id


def show(client: MlflowClient, experiment_id: str, stage: str) -> str:
    """A run of a training that is still going on, in the place of any other such; returns its id."""
    arm, running = stage.partition("-")[2], f"tags.`pat.stage` = '{stage}' AND tags.`{LIVE}` = 'yes'"
    for other in client.search_runs([experiment_id], running):
        client.delete_run(other.info.run_id)
    tags = {CURRENT: "yes", LIVE: "yes", "pat.stage": stage, "pat.rule": "train", "pat.arm": arm}
    return client.create_run(experiment_id, None, tags, f"{stage}, running").info.run_id


def supersede(client: MlflowClient, run: Run) -> None:
    """Make `run` the current one of its stage. Earlier ones get a number, a pale colour and `pat.current` = no.

    Removed are what the stage showed while it ran, and an earlier log of the same execution.
    """
    stage, info = run.data.tags["pat.stage"], run.info
    others = client.search_runs([info.experiment_id], f"tags.`pat.stage` = '{stage}'", order_by=["start_time ASC"])
    others = [other for other in others if other.info.run_id != info.run_id]
    numbered = sum(other.data.tags.get(CURRENT) == "no" for other in others)
    for other in others:
        times = (other.info.start_time, other.info.end_time)
        if other.data.tags.get(LIVE) == "yes" or times == (info.start_time, info.end_time):
            client.delete_run(other.info.run_id)
        elif other.data.tags.get(CURRENT) != "no":
            numbered += 1
            client.update_run(other.info.run_id, name=f"{other.info.run_name}, earlier {numbered}")
            for tag, value in ((CURRENT, "no"), (SUPERSEDED_BY, info.run_id), ("mlflow.runColor", FADED)):
                client.set_tag(other.info.run_id, tag, value)


def _tags(stage: str, facts: Facts) -> dict[str, str]:
    tags = {
        CURRENT: "yes",
        "pat.stage": stage,
        "pat.rule": stage.partition("-")[0],
        "mlflow.source.name": f"pat {stage}",
    } | facts.tags
    if (commit := tags.get("pat.git") or provenance.git_sha()) is not None:
        tags |= {"pat.git": commit, "mlflow.source.git.commit": commit}
    with suppress(OSError, KeyError):  # a user without a name, as in some containers
        tags["mlflow.user"] = getpass.getuser()
    if facts.colour:
        tags["mlflow.runColor"] = facts.colour
    return {limits.name(key): limits.shortened(value, limits.TAG) for key, value in tags.items()}


def _log_origin(kept: Files, facts: Facts) -> None:
    """The environment and the checkout, as they are now; what the stage itself recorded stands first."""
    kept.text("\n".join(provenance.packages()) + "\n", "environment/packages.txt")
    changes = provenance.git_changes()
    state = {"stage ran at": facts.tags.get("pat.git"), "tracked at": provenance.git_sha(), "changed": bool(changes)}
    kept.json(state, "git/state.json")
    if changes:
        kept.text(changes[:MAX_DIFF], "git/changes.diff")


def _note(facts: Facts, run_id: str, experiment_dir: Path) -> str:
    """The run's description, with the figure, which MLflow fetches from the run's own files, after two paragraphs: so
    much does MLflow show before one unfolds it."""
    verdict, answer, *rest = facts.note.split("\n\n")
    if facts.image is not None and facts.image.exists():
        path = quote(facts.image.relative_to(experiment_dir).as_posix(), safe="")
        rest = [f"![{facts.image.stem}](get-artifact?path={path}&run_uuid={run_id})", *rest]
    return "\n\n".join([verdict, answer, *rest])


def _metric(each: Measurement, end_ms: int) -> Metric:
    return Metric(limits.name(each.name), each.value, end_ms if each.time_ms is None else each.time_ms, each.step)


def _dataset(data: DataSet) -> DatasetInput:
    """MLflow's record of a Parquet file: it knows pandas frames."""
    import pandas
    from mlflow.data.pandas_dataset import from_pandas

    frame = pandas.read_parquet(data.path)
    with warnings.catch_warnings():  # that a path is taken for the path of a local file
        warnings.simplefilter("ignore")
        dataset = from_pandas(frame, source=data.path, name=data.name, digest=data.digest)
    return DatasetInput(dataset._to_mlflow_entity(), [InputTag("mlflow.data.context", data.split)])


def _chunks(items: Sequence, size: int) -> Iterator[Sequence]:
    return (items[start : start + size] for start in range(0, len(items), size))
