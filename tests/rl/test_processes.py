"""Ending processes: asked first, then killed; and those whose parent has gone."""

import os
import subprocess
import sys

import psutil

from pat.rl import processes
from tests.rl.endings import DEADLINE_S, gone


def test_a_process_that_does_not_listen_is_killed():
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as deaf:
        assert deaf.stdout.readline() == "deaf\n"
        processes.end([psutil.Process(deaf.pid)], grace_s=0.2)
        assert gone(deaf.pid)


def test_a_process_that_listens_is_asked_first(tmp_path):
    code = "import signal, sys, time; signal.signal(15, lambda *_: (open(sys.argv[1], 'w').close(), exit(0)))\n"
    code += "print('ready', flush=True); time.sleep(600)"
    note = tmp_path / "asked"
    with subprocess.Popen([sys.executable, "-c", code, str(note)], stdout=subprocess.PIPE, text=True) as polite:
        assert polite.stdout.readline() == "ready\n"
        processes.end([psutil.Process(polite.pid)], grace_s=5.0)
    assert note.exists()


def test_processes_that_have_ended_by_themselves_are_no_trouble():
    ended = subprocess.Popen(["true"])
    process = psutil.Process(ended.pid)
    ended.wait(DEADLINE_S)
    processes.end([process], grace_s=5.0)
    assert processes.tree(ended.pid) == []


def test_a_child_ends_with_a_parent_that_is_killed():
    code = (
        "import subprocess, sys, time; from pat.rl import processes\n"
        "child = subprocess.Popen(['sleep', '600'], preexec_fn=processes.end_with_parent)\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert psutil.pid_exists(child)
        parent.kill()
        assert gone(child)


def test_an_orphan_is_among_the_descendants_of_who_adopts_it():
    code = (
        "import os, subprocess, time; from pat.rl import processes\n"
        "processes.adopt_orphans()\n"
        "subprocess.run(['sh', '-c', 'sleep 600 & echo $!'])\n"
        "print([p.pid for p in processes.tree(os.getpid())], os.getpid(), flush=True)\n"
        "processes.end(processes.tree(os.getpid())[:-1], grace_s=1.0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    orphan, tree = done.stdout.splitlines()
    assert orphan in tree
    assert gone(int(orphan))
    assert os.getpid() not in map(int, tree.translate(str.maketrans("[],", "   ")).split())


# --- the guard ---------------------------------------------------------------------------------
STARTS = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"


def guarded(folder, code):
    command = [sys.executable, "-m", "pat.rl.guard", str(folder), sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_what_a_command_has_left_ends_with_it_and_its_folder_too(tmp_path):
    (tmp_path / "made").mkdir()
    with guarded(tmp_path / "made", f"{STARTS}; sys.exit(3)") as guard:
        left = int(guard.stdout.readline())
        assert guard.wait(DEADLINE_S) == 3
    assert gone(left)
    assert not (tmp_path / "made").exists()


def test_a_command_ends_with_whoever_holds_its_guards_input(tmp_path):
    with guarded("", f"{STARTS}; time.sleep(600)") as guard:
        left = int(guard.stdout.readline())
        guard.stdin.close()  # as the kernel does for a process that is killed
        assert guard.wait(DEADLINE_S) == 0
    assert gone(left)


def test_a_signal_that_ended_the_command_is_passed_on():
    with guarded("", "import os; os.kill(os.getpid(), 9)") as guard:
        assert guard.wait(DEADLINE_S) == -9
