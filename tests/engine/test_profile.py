"""``pat profile`` on a real engine: killed in the middle, the same command goes on with what is missing."""

import json
import signal
import subprocess
import sys
import time

import polars as pl
import psutil
import pytest

from pat import config as schema
from pat.profile import tables
from tests.engine.conftest import write_model

CONFIG = {
    "ranks": 2,
    "tp_sizes": [1, 2],
    "seed": 0,
    "model": {"source": "random", "dtype": "float32"},
    "rollout": {"max_prompt": 16, "max_response": 64, "kv_tokens": 1024, "sglang": {}},
    "profile": {"batches": [1, 2], "contexts": [16], "prefill": [8], "steps": 4, "repeats": 1},
}
DEADLINE_S = 180


@pytest.fixture
def experiment(tmp_path):
    write_model(tmp_path / "model", "qwen3")
    (tmp_path / "config").mkdir()
    section = {key: CONFIG[key] for key in CONFIG}
    section["profile"] = schema.Profile(**CONFIG["profile"]).model_dump(mode="json")
    (tmp_path / "config" / "profile.json").write_text(json.dumps(section))
    return tmp_path


def start(experiment):
    command = [sys.executable, "-m", "pat.cli", "profile", "--config", str(experiment / "config" / "profile.json")]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def kill(process):
    """End it as the kernel would, and whatever it has started."""
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    _gone, left = psutil.wait_procs(family[1:], timeout=20)
    for child in left:
        child.kill()


@pytest.mark.engine
def test_a_killed_profile_goes_on_where_it_was(experiment):
    process, seen = start(experiment), []
    for line in process.stdout:
        seen.append(line)
        if "profile [6/" in line:
            break
    kill(process)
    partial = experiment / "profile" / "partial.jsonl"
    assert partial.exists(), "".join(seen)
    before = [json.loads(line) for line in partial.read_text().splitlines()[1:]]
    assert len(before) >= 6
    assert not (experiment / "profile" / "decode.parquet").exists()

    begin = time.monotonic()
    process = start(experiment)
    output, _ = process.communicate(timeout=DEADLINE_S)
    most = time.monotonic() - begin + sum(row["seconds"] for row in before)
    assert process.returncode == 0, output
    assert f"{len(before)} of them were measured before" in output
    assert f"profile [{len(before)}/" not in output
    assert f"profile [{len(before) + 1}/" in output
    assert not partial.exists()
    found = {path.stem: pl.read_parquet(path) for path in (experiment / "profile").glob("*.parquet")}
    assert set(found) == {"decode", "prefill", "switch", "transfer", "generation"}
    kept = tables(
        [row["sample"] for row in before]
        + [{"generation": True, "repeat": 0, "steps": before[0]["sample"]["steps"], "switches": []}]
    )
    assert set(kept["decode"]["seconds"]) < set(found["decode"]["seconds"])
    for name in ("decode", "prefill", "generation"):
        assert set(found[name]["tp"]) == {1, 2}
        assert (found[name]["seconds"] > 0).all()
    assert {(a, b, mode) for a, b, mode in found["switch"].select("tp_from", "tp_to", "mode").rows()} == {
        (a, b, mode) for a, b in ((1, 2), (2, 1), (1, 1)) for mode in ("migrate", "recompute")
    }
    assert {1, 2} <= set(found["decode"]["batch"])
    assert json.loads((experiment / "profile" / "machine.json").read_text())["seconds"] < most
