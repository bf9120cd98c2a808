"""One process at a time makes a stage, and the second is told who does."""

import os
import re
import subprocess
import sys

import pytest

from pat import owner

HOLDS = "import sys, time\nfrom pathlib import Path\nfrom pat.owner import only\n"
HOLDS += "with only(Path(sys.argv[1]), 'profile'):\n    print('held', flush=True)\n    time.sleep(600)"


@pytest.fixture
def holder(tmp_path):
    """Another process that makes the profile of the experiment in ``tmp_path``."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_is_told_who_makes_it_and_how_to_end_that(holder, tmp_path, monkeypatch):
    with pytest.raises(owner.Busy) as told, owner.only(tmp_path, "profile", wait_s=0.1):
        pass
    line = f"profile of {tmp_path.name} is being made already, by process {holder.pid} on "
    assert str(told.value).startswith(line)
    assert re.search(rf" since \d{{4}}-.*, or end it by `kill {holder.pid}`$", str(told.value))
    with owner.only(tmp_path, "train-pat", wait_s=0.1):  # another stage is free
        pass


def test_it_waits_for_one_that_is_about_to_end(holder, tmp_path, capsys):
    holder.kill()
    with owner.only(tmp_path, "profile", wait_s=30):
        assert f'"pid": {os.getpid()}' in (tmp_path / "locks" / "profile.json").read_text()
    with owner.only(tmp_path, "profile", wait_s=0):  # free again
        pass


def test_of_a_job_of_slurm_the_job_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with owner.only(tmp_path, "assets"):
        monkeypatch.delenv("SLURM_JOB_ID")
        code = "import sys\nfrom pathlib import Path\nfrom pat.owner import only\n"
        code += "with only(Path(sys.argv[1]), 'assets', 0.1): pass"
        done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert "in Slurm job 4711" in done.stderr
    assert done.stderr.endswith("or end it by `scancel 4711`\n")


def test_the_command_says_it_in_a_line(tmp_path, monkeypatch, capsys):
    from pat import cli

    monkeypatch.setattr(owner.only.__wrapped__, "__defaults__", (0.1,))
    monkeypatch.setattr(sys, "argv", ["pat", "hardware", "--config", "config/ci.yaml", "--experiment", "ci-qwen3"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--out", str(tmp_path)])
    (tmp_path / "locks").mkdir()
    lock = owner.FileLock(tmp_path / "locks" / "hardware.lock", is_singleton=False)
    with lock, pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert re.fullmatch(r"error: hardware of \S+ is being made already, .*\n", capsys.readouterr().err)
