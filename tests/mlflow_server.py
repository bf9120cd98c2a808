"""A real `mlflow server` for tests, ended with all that it started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_S = 120.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def running(folder: Path, port: int, database: Path | None = None, artifacts: Path | None = None) -> Iterator[str]:
    """The server's URL. It keeps its database and files in `folder`, unless others are given."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "2"),
        *("--backend-store-uri", f"sqlite:///{database or folder / 'server.db'}"),
        *("--artifacts-destination", str(artifacts or folder / "artifacts")),
    ]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # its session has no other processes than its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=10)


def _wait(server: subprocess.Popen, url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"mlflow server did not start: {log.read_text()[-2000:]}")
