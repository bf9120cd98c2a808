"""`pat bench switch`: SGLang's requests through a whole handover, and back as they were."""

import json
import subprocess
import sys


def test_the_command_writes_each_part_of_a_switch_and_of_a_step(tmp_path):
    command = [sys.executable, "-m", "pat.cli", "bench", "switch", "--requests", "24", "--tokens", "64"]
    done = subprocess.run(
        [*command, "--ranks", "4", "--sizes", "1,2", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "switch.json").read_text())
    assert set(found["seconds"]) == {"write", "share", "place", "take", "total"}
    assert all(seconds > 0 for seconds in (*found["seconds"].values(), *found["live_list_s"].values()))
    assert (found["requests"], found["tokens"], found["tp_from"], found["tp_to"]) == (24, 64, 1, 2)
    assert "place" in done.stdout and "live list a step" in done.stdout
    wrong = subprocess.run([*command, "--ranks", "4", "--sizes", "1,3"], capture_output=True, text=True, timeout=60)
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
    assert "--sizes" in wrong.stderr
