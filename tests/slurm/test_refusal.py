"""The test cluster leaves a machine alone that has a Slurm of its own, and leaves nothing behind."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.slurm import cluster as slurm


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A folder in the place of /etc/slurm, on a machine that could run the cluster."""
    if (reason := slurm.unavailable()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(slurm, "SYSTEM", tmp_path)
    assert slurm.unavailable() is None
    return tmp_path


@pytest.mark.parametrize("name", slurm.NAMES)
def test_a_configuration_that_is_not_ours_is_left_alone(system, name):
    (system / name).write_text("ClusterName=production\n")
    with pytest.raises(slurm.Refused, match=f"{name} exists: this machine has a Slurm of its own"), slurm.running():
        pass
    assert (system / name).read_text() == "ClusterName=production\n"


def test_a_link_to_another_configuration_is_left_alone(system):
    (system / "slurm.conf").symlink_to("/cm/shared/slurm.conf")
    assert "slurm.conf exists" in slurm.unavailable()


def test_a_configuration_in_the_environment_is_left_alone(system, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/cm/shared/slurm.conf")
    assert "SLURM_CONF is set to /cm/shared/slurm.conf" in slurm.unavailable()


def test_a_daemon_that_is_not_ours_is_left_alone(system, tmp_path):
    program = tmp_path / "slurmctld"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "60"])
    try:
        assert f"slurmctld is running (process {process.pid})" in slurm.unavailable()
    finally:
        process.kill()
        process.wait()


def test_missing_programs_are_named(system, monkeypatch):
    monkeypatch.setattr(slurm, "PROGRAMS", ("slurmctld", "no-such-program"))
    assert slurm.unavailable().startswith("missing: no-such-program (apt-get install")


def test_one_at_a_time_and_nothing_is_left():
    if (reason := slurm.unavailable()) is not None:
        pytest.skip(reason)
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PAT_CLUSTER")}
    with slurm.running(nodes=1, gpus=2) as cluster:
        other = "from tests.slurm import cluster\nwith cluster.running(wait_s=0.1): pass"
        done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
        assert "another test cluster has held" in done.stderr
        cluster.run("sbatch", "--output=/dev/null", "--wrap", "sleep 300")
        wait_for(lambda: any(job["JobState"] == "RUNNING" for job in cluster.jobs()))
        assert slurm.unavailable() is None
    assert not slurm.FOLDER.exists()
    assert not any(os.path.lexists(slurm.SYSTEM / name) for name in slurm.NAMES)
    names = {"slurmctld", "slurmd", "slurmstepd", "munged"}
    found = [process.info for process in psutil.process_iter(["name", "status"]) if process.info["name"] in names]
    assert [info for info in found if info["status"] != psutil.STATUS_ZOMBIE] == []
    assert {name: os.environ.get(name) for name in before} == before


def test_what_a_killed_session_left_is_ended_by_the_next():
    if (reason := slurm.unavailable()) is not None:
        pytest.skip(reason)
    script = "import os, signal\nfrom tests.slurm import cluster\n"
    script += "with cluster.running(nodes=1, gpus=2): os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    left = {process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "slurmctld"}
    assert left
    with slurm.running(nodes=1, gpus=2) as cluster:
        assert cluster.states() == {"pat1": "idle"}
        assert not any(psutil.pid_exists(pid) for pid in left)


def wait_for(condition, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.1)
