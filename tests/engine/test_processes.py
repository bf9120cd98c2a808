"""Processes forked from one that has imported SGLang behave as spawned ones would."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pat.engine.cpu import processes

pytestmark = pytest.mark.engine


def child(queue):
    import sglang.srt.managers.scheduler  # noqa: F401  (there already: a fresh process would need seconds)

    grandchild = multiprocessing.Process(target=report, args=(queue, "grandchild"))
    grandchild.start()
    report(queue, "child")
    grandchild.join(30)


def report(queue, name):
    queue.put((name, os.getppid(), os.environ.get("PAT_TEST_VARIABLE"), signal.getsignal(signal.SIGQUIT)))


def fail():
    psutil.Process().parent().send_signal(signal.SIGQUIT)  # as SGLang's processes do


@pytest.fixture
def forked(monkeypatch):
    processes.warm()
    before = multiprocessing.context._default_context._actual_context
    processes.use()
    yield
    multiprocessing.context._default_context._actual_context = before


def test_children_and_theirs_have_one_parent_and_the_environment_of_their_start(forked, monkeypatch):
    seen = {}
    for value in ("first", "second"):
        monkeypatch.setenv("PAT_TEST_VARIABLE", value)
        queue = multiprocessing.Queue()
        process = multiprocessing.Process(target=child, args=(queue,))
        process.start()
        for _ in range(2):
            name, parent, variable, handler = queue.get(timeout=60)
            seen[name, value] = parent
            assert variable == value
            assert handler == signal.SIG_DFL
        process.join(30)
        assert process.exitcode == 0
    assert len(set(seen.values())) == 1
    assert psutil.Process(seen["child", "first"]).ppid() == os.getpid()


def test_a_childs_failure_signal_reaches_the_process_that_started_it(forked):
    heard = []
    before = signal.signal(signal.SIGQUIT, lambda *_: heard.append(True))
    try:
        multiprocessing.Process(target=fail).start()
        deadline = time.monotonic() + 60
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGQUIT, before)
    assert heard


def test_the_fork_server_ends_with_the_process_that_started_it():
    code = (
        "import os, multiprocessing.forkserver as f\n"
        "from pat.engine.cpu import processes\n"
        "processes.warm(); print(f._forkserver._forkserver_pid, flush=True); input()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    server = psutil.Process(int(owner.stdout.readline()))
    deadline = time.monotonic() + 60
    while server.name() != "pat::fork_server" and time.monotonic() < deadline:
        time.sleep(0.05)
    owner.kill()
    owner.wait(10)
    assert not psutil.wait_procs([server], timeout=30)[1]
