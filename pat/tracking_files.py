"""Where a run's files go: beside the tracking database, by a path that survives a move of both; or to the server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

# MLflow's name of "where the server keeps files". A database that is written without a server has it too, so that no
# absolute path stands in it: whoever serves it says where the files are (`pat ui`), today and after a move.
SCHEME = "mlflow-artifacts:/"


class Files:
    """Adds files to a run. root: folder of all runs' files, for one that no server keeps them."""

    def __init__(self, client: MlflowClient, run: Run, root: Path | None) -> None:
        self.client, self.run_id = client, run.info.run_id
        uri = run.info.artifact_uri
        # An experiment that was made before this says where its files are by an absolute path, which MLflow writes to.
        self.folder = root / uri.removeprefix(SCHEME).lstrip("/") if root and uri.startswith(SCHEME) else None

    def add(self, path: Path, folder: str | None = None) -> None:
        """The file ``path`` under its own name in ``folder`` of the run."""
        if self.folder is None:
            self.client.log_artifact(self.run_id, str(path), folder)
            return
        target = self.folder / (folder or "")
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / path.name)

    def text(self, text: str, name: str) -> None:
        if self.folder is None:
            self.client.log_text(self.run_id, text, name)
            return
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text, encoding="utf-8")

    def json(self, value: Any, name: str) -> None:
        self.text(json.dumps(value, indent=2) + "\n", name)
