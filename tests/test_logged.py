"""A logged command: seen, kept, and explained when it fails."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from pat import logged
from tests.rl.endings import DEADLINE_S, gone


def run(tmp_path, code: str) -> tuple[int, str]:
    log = tmp_path / "logs" / "stage.log"
    return logged.run([sys.executable, "-c", code], log, "pat stage"), log.read_text()


def test_output_goes_to_terminal_and_log(tmp_path, capfdbinary):
    code, log = run(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); print('bar\\r', end='')")
    assert code == 0
    assert sorted(log.split()) == ["bar", "err", "out"]
    out, err = capfdbinary.readouterr()
    assert (out, err) == ((tmp_path / "logs" / "stage.log").read_bytes(), b"")
    assert out.endswith(b"\r")  # a progress bar stays one


def test_failure_shows_the_reason_and_the_log(tmp_path, capfd):
    code, _ = run(tmp_path, "print('chatter\\n' * 50); raise ValueError('too few prompts')")
    assert code == 1
    error = capfd.readouterr().err
    assert "pat stage failed (exit status 1)" in error
    assert "ValueError: too few prompts" in error
    assert "chatter" not in error
    assert error.rstrip().endswith(f"The whole log: {tmp_path / 'logs' / 'stage.log'}")


def test_killed_command(tmp_path, capfd):
    code, _ = run(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert code == 128 + 9
    assert "ended by SIGKILL, perhaps for lack of memory" in capfd.readouterr().err


def test_a_daemon_that_keeps_the_pipe_open_is_not_waited_for(tmp_path):
    code, log = run(tmp_path, "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)")
    assert code == 0
    os.kill(int(log), signal.SIGKILL)  # it was still running


def test_sigterm_reaches_the_command(tmp_path):
    log = tmp_path / "log"
    inner = "import signal, time; signal.signal(15, lambda *_: exit(7)); print('ready'); time.sleep(60)"
    outer = "import sys; from pathlib import Path; from pat import logged; "
    outer += f"sys.exit(logged.run([sys.executable, '-c', {inner!r}], Path({str(log)!r}), 'x'))"
    process = subprocess.Popen([sys.executable, "-c", outer])
    while not (log.exists() and "ready" in log.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=30) == 7


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\nconfig error: x: got 1; allowed: 2\n", ["config error: x: got 1; allowed: 2"]),
        ("10%\r20%\r\nKeyError: 'x'\nbye\n", ["KeyError: 'x'"]),
        (
            "(pid=7) torch.OutOfMemoryError: CUDA out of memory\nx\n",
            ["(pid=7) torch.OutOfMemoryError: CUDA out of memory"],
        ),
        ("one\n\ntwo\n", ["one", "two"]),
        ("", []),
    ],
)
def test_telling_lines(text, lines):
    assert logged.telling_lines(text) == lines


def test_telling_lines_are_few():
    text = "\n".join(f"E{i}: RuntimeError: {i}" for i in range(100))
    assert logged.telling_lines(text, most=3) == [f"E{i}: RuntimeError: {i}" for i in (97, 98, 99)]


def test_interrupt_lets_the_command_end_by_itself(tmp_path):
    log = tmp_path / "log"
    inner = (
        "import time\n"
        "try:\n    print('ready'); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(0.5); print('tidied up'); exit(3)"
    )
    outer = "import sys; from pathlib import Path; from pat import logged; "
    outer += f"sys.exit(logged.run([sys.executable, '-c', {inner!r}], Path({str(log)!r}), 'x'))"
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what is started in the background ignores it
    process = subprocess.Popen([sys.executable, "-c", outer], start_new_session=True, preexec_fn=heard)
    while not (log.exists() and "ready" in log.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    assert process.wait(timeout=30) == 3
    assert "tidied up" in log.read_text()


def test_a_full_disk_costs_the_log_but_not_the_command(capfd):
    """Writing to /dev/full fails as on a disk without room."""
    status = logged.run([sys.executable, "-c", "print('KeyError: 7'); exit(3)"], Path("/dev/full"), "x")
    assert status == 3
    out, err = capfd.readouterr()
    assert out == "KeyError: 7\n"
    assert "  KeyError: 7\n" in err


# As Snakemake runs a rule: through a shell, which stays alive when Snakemake is killed.
RULE = """
import os, subprocess, sys, time
os.environ["PAT_OWNER"] = str(os.getpid())
outer = "import sys; from pathlib import Path; from pat import logged; "
outer += "logged.run([sys.executable, '-c', sys.argv[2]], Path(sys.argv[1]), 'pat stage')"
subprocess.run(["bash", "-c", '"$@"; true', "bash", sys.executable, "-c", outer, *sys.argv[1:]])
"""
STAGE = "import os, subprocess, time; child = subprocess.Popen(['sleep', '600']).pid; "
STAGE += "print(child, os.getpid(), os.getppid(), flush=True); "


def rule(tmp_path, then: str) -> tuple[subprocess.Popen, list[int]]:
    """A rule that has started: the process above it; its descendants that are to end: two of the stage, and pat."""
    log = tmp_path / "log"
    above = subprocess.Popen([sys.executable, "-c", RULE, log, STAGE + then], stdout=subprocess.DEVNULL)
    while not (log.exists() and log.read_text().endswith("\n")):
        assert above.poll() is None
        time.sleep(0.05)
    return above, list(map(int, log.read_text().split()))


def test_a_stage_ends_with_the_snakemake_that_was_killed(tmp_path):
    above, descendants = rule(tmp_path, "time.sleep(600)")
    above.kill()
    assert above.wait(DEADLINE_S) == -signal.SIGKILL
    assert all(gone(pid) for pid in descendants)
    assert "the Snakemake that started it was killed" in (tmp_path / "log").read_text()


def test_it_may_tidy_up_first(tmp_path):
    above, descendants = rule(
        tmp_path,
        "import signal; signal.signal(15, lambda *_: (print('tidied up', flush=True), exit(0))); time.sleep(600)",
    )
    above.kill()
    above.wait(DEADLINE_S)
    assert all(gone(pid) for pid in descendants)
    assert (tmp_path / "log").read_text().endswith("tidied up\n")


def test_a_stage_ends_with_the_process_that_logs_it(tmp_path):
    above, (_, stage, logs) = rule(tmp_path, "time.sleep(600)")
    os.kill(logs, signal.SIGKILL)
    assert gone(stage)
    assert above.wait(DEADLINE_S) == 0  # its shell goes on
