"""What an engine's callers learn when one of its processes ends; the processes here are idle ones."""

import asyncio
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pat.engine import watch as module
from pat.engine.board import Board
from pat.engine.endings import Ending, culprit, last_words, tell_exit_codes
from pat.engine.errors import EngineDead
from pat.engine.watch import Watch


# --- how a process ended -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (Ending("rank 1", 7, True, error="ValueError: no"), "rank 1 (pid 7) failed: ValueError: no"),
        (Ending("rank 1", 7, True, exitcode=-15), "rank 1 (pid 7) was killed by SIGTERM"),
        (Ending("rank 1", 7, True, exitcode=-9), "SIGKILL; the system does so when memory runs out"),
        (Ending("rank 1", 7, True, exitcode=-63), "was killed by signal 63"),
        (Ending("the detokenizer", 7, False, exitcode=0), "the detokenizer (pid 7) ended with exit code 0"),
        (Ending("rank 1", 7, True), "rank 1 (pid 7) has ended"),
    ],
)
def test_an_ending_in_words(ending, text):
    if "63" in text and 63 in {s.value for s in signal.Signals}:
        pytest.skip("signal 63 has a name here")
    assert text in str(ending)


def test_a_killed_rank_comes_before_those_that_lost_it_and_words_before_silence():
    killed, failed = Ending("rank 1", 1, True, exitcode=-9), Ending("rank 0", 2, True, error="connection closed")
    silent, other = Ending("rank 2", 3, True), Ending("the data-parallel controller", 4, False, exitcode=-3)
    assert culprit([other, silent, failed, killed]) == killed
    assert culprit([other, silent, failed]) == failed
    assert culprit([other, silent]) == silent
    assert culprit([other]) == other


def test_an_exception_is_noted_and_goes_its_way(tmp_path):
    with pytest.raises(ZeroDivisionError), last_words(tmp_path):
        _ = 1 / 0
    ending = Ending.of("rank 0", os.getpid(), True, tmp_path)
    assert ending.error == "ZeroDivisionError: division by zero"
    with last_words(tmp_path / "gone"):  # nothing to note
        pass
    with pytest.raises(ZeroDivisionError), last_words(tmp_path / "gone"):
        _ = 1 / 0


def test_exit_codes_are_noted_by_the_process_that_started_them(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=os._exit, args=(3,)), context.Process(target=time.sleep, args=(60,))]
    for process in processes:
        process.start()
    thread = tell_exit_codes(tmp_path, processes)
    processes[1].kill()
    thread.join(30)
    codes = [Ending.of("rank", process.pid, True, tmp_path).exitcode for process in processes]
    assert codes == [3, -9]


# --- the watch ---------------------------------------------------------------------------------------------
@pytest.fixture
def idle(tmp_path):
    """Two idle processes that have loaded the plugin, the first of them rank 0, and a watch of them."""
    code = "import time; time.sleep(120)"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    board = Board.create(tmp_path, 0)
    board.show_pid(processes[0].pid)
    for process in processes:
        (tmp_path / f"plugin.{process.pid}").touch()
    (tmp_path / f"plugin.{os.getpid()}").touch()
    watch = Watch(tmp_path, [board])
    yield watch, processes
    watch.close()
    for process in processes:
        process.kill()
        process.wait(10)


async def fails(watch, awaitable, within=3.0):
    begin = time.monotonic()
    with pytest.raises(EngineDead) as caught:
        await watch.outlive(awaitable)
    assert time.monotonic() - begin < within
    return str(caught.value)


def test_what_waits_ends_when_a_process_is_killed_and_the_others_are_ended(idle):
    watch, (rank, other) = idle

    async def main():
        forever = asyncio.get_running_loop().create_future()
        waiting = asyncio.gather(*(fails(watch, forever) for _ in range(3)))
        await asyncio.sleep(0.5)
        rank.kill()
        texts = await waiting
        return [*texts, await fails(watch, asyncio.sleep(60))]

    for text in asyncio.run(main()):
        assert f"rank 0 (pid {rank.pid}) has ended" in text
    assert other.wait(10) == -signal.SIGKILL
    with pytest.raises(EngineDead, match="rank 0"):
        watch.check()


def test_callers_in_several_loops_are_told(idle):
    import threading

    watch, (rank, _) = idle
    texts = []

    def caller():
        texts.append(asyncio.run(fails(watch, asyncio.sleep(60), 10)))

    threads = [threading.Thread(target=caller) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    rank.terminate()
    for thread in threads:
        thread.join(20)
    assert len(texts) == 3


def test_words_of_a_process_end_the_engine_before_the_process_does(idle):
    watch, (rank, other) = idle
    (watch.folder / f"error.{other.pid}").write_text("RuntimeError: no room")
    text = asyncio.run(fails(watch, asyncio.sleep(60)))
    assert f"a process of SGLang (pid {other.pid}) failed: RuntimeError: no room" in text
    assert rank.wait(10) == -signal.SIGKILL


def test_results_errors_and_cancellations_pass(idle):
    watch, _ = idle

    async def raising():
        raise KeyError("x")

    async def main():
        assert await watch.outlive(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(KeyError):
            await watch.outlive(raising())
        inner = asyncio.ensure_future(asyncio.sleep(60))
        outer = asyncio.ensure_future(watch.outlive(inner))
        await asyncio.sleep(0.05)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert inner.cancelled()
        assert not watch._waiting

    asyncio.run(main())


def test_a_signal_without_an_ending_is_told_as_such(idle, monkeypatch):
    watch, _ = idle
    monkeypatch.setattr(module, "SIGNAL_S", 0.3)
    monkeypatch.setattr(module, "_last_end", -math.inf)
    before = signal.getsignal(signal.SIGQUIT)
    module.take_sigquit()
    try:
        os.kill(os.getpid(), signal.SIGQUIT)
        assert "SIGQUIT" in asyncio.run(fails(watch, asyncio.sleep(60)))
    finally:
        signal.signal(signal.SIGQUIT, before)


def test_a_signal_of_an_engine_that_has_died_and_is_gone_does_not_end_another(idle, tmp_path, monkeypatch):
    watch, (rank, other) = idle
    monkeypatch.setattr(module, "SIGNAL_S", 1.0)
    monkeypatch.setattr(module, "_last_end", -math.inf)
    folder = tmp_path / "failing"
    folder.mkdir()
    failing = Watch(folder, [])
    try:
        module.ring_all()
        failing.declare_dead("its rank failed")
        failing.close()
        time.sleep(2.0)
        assert watch.death is None
        assert (rank.poll(), other.poll()) == (None, None)
    finally:
        failing.close()


def test_after_a_signal_the_process_that_ended_is_named(idle):
    watch, (rank, _) = idle
    module.ring_all()
    rank.kill()
    assert "rank 0" in asyncio.run(fails(watch, asyncio.sleep(60)))


def test_without_an_engine_a_signal_does_what_it_did():
    code = (
        "import os, signal\n"
        "from pat.engine import watch\n"
        "watch.take_sigquit()\n"
        "os.kill(os.getpid(), signal.SIGQUIT)\n"
        "import time; time.sleep(5); print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGQUIT


def test_a_closed_watch_declares_nothing(idle):
    watch, (rank, _) = idle
    watch.close()
    rank.kill()
    time.sleep(1.0)
    assert watch.death is None
    watch.check()


def test_our_own_process_and_other_children_are_left_alone(idle):
    watch, (rank, other) = idle
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        watch.end_processes()
        assert psutil.Process(bystander.pid).is_running()
        assert bystander.poll() is None
        assert (rank.wait(5), other.wait(5)) == (-9, -9)
    finally:
        bystander.kill()
        bystander.wait(10)
