"""MLflow's pages on what the stages of a configuration have logged, wherever that is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pat import tracking
from pat.config import Config
from pat.problems import ConfigError, Problem, shown


def run(configs: Mapping[str, Config], experiment: str | None, port: int) -> None:
    """Become MLflow's server on the configuration's database; of a server that runs already print the address.

    experiment: only where this one is. Raises ConfigError if there is no such, if the experiments log to different
    places, or if nothing has been logged.
    """
    if experiment is not None:
        if experiment not in configs:
            raise ConfigError(Problem(("--experiment",), shown(experiment), f"one of {', '.join(configs)}"))
        configs = {experiment: configs[experiment]}
    places = {(each.tracking.uri, each.tracking.artifacts) for each in configs.values()}
    if named := os.environ.get(tracking.VARIABLE):
        places = {(named, artifacts) for _, artifacts in places}
    if len(places) > 1:
        listed = ", ".join(uri for uri, _ in sorted(places))
        raise ConfigError(Problem(("tracking",), listed, "one place; choose with --experiment"))
    ((uri, artifacts),) = places
    if uri.startswith(tracking.SERVER):
        print(f"MLflow: {uri}, a server that runs already")
        return
    database = Path(uri.removeprefix(tracking.SQLITE))
    if not database.exists():
        raise ConfigError(Problem(("tracking", "uri"), uri, "a database that exists: run the pipeline first"))
    print(f"MLflow: http://127.0.0.1:{port} (Ctrl-C ends it); {database}, files in {artifacts}", flush=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"{tracking.SQLITE}{database.resolve()}"]
    command += ["--artifacts-destination", str(Path(artifacts).resolve())]
    os.execve(command[0], command, os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})
