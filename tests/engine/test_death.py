"""A process of the engine that ends is an error for whoever waits, in time, and never a wait for ever."""

import asyncio
import atexit
import os
import signal
import subprocess
import threading
import time

import psutil
import pytest

from pat.engine import api
from pat.engine.board import Board
from pat.engine.errors import EngineDead
from pat.engine.shared import shared_folder
from pat.policy import Threshold
from tests.engine.conftest import Driver, family, jobs, start, update_of

pytestmark = pytest.mark.engine

LONG = {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}
WITHIN_S = 20  # not for ever, however busy the machine; half a second is usual


class Victim:
    """An engine, and what must be gone when it is."""

    def __init__(self, engine, others):
        self.engine, self.folder = engine, engine.settings.path
        self.children = [process for process in family() if process not in others]
        self.killed = None

    def kill(self, pid, number=signal.SIGKILL):
        """Kill it in a while, when the engine generates."""

        def later():
            while not self.engine.progress()[0]:
                time.sleep(0.01)
            time.sleep(0.2)
            self.killed = time.monotonic()
            os.kill(pid, number)

        threading.Thread(target=later, daemon=True).start()

    def check(self, error, text):
        assert time.monotonic() - self.killed < WITHIN_S
        assert text in str(error.value)


@pytest.fixture
def victim(model_folder, request):
    others, options = family(), getattr(request, "param", {})
    made = Victim(start(model_folder("qwen3"), tp_sizes=(1, 2), max_total_tokens=8192, **options), others)
    yield made
    made.engine.shutdown()
    assert not psutil.wait_procs(made.children, timeout=20)[1]
    assert not made.folder.exists()


def test_a_killed_rank_ends_a_blocking_call_and_all_later_ones(victim):
    engine = victim.engine
    pid = engine.boards[1].pid
    victim.kill(pid)
    with pytest.raises(EngineDead) as error:
        engine.generate(input_ids=[[5, 6, 7]] * 3, sampling_params=LONG)
    victim.check(error, f"rank 1 (pid {pid})")
    for call in (
        lambda: engine.generate(input_ids=[5, 6, 7], sampling_params=LONG),
        lambda: next(engine.generate(input_ids=[5, 6, 7], sampling_params=LONG, stream=True)),
        lambda: engine.switch(2),
        lambda: engine.switch(1),
        lambda: engine.flush_cache(),
        lambda: engine.get_server_info(),
        lambda: engine.update_weights_from_disk("/nowhere"),
        lambda: engine.loop.run_until_complete(engine.update_weights("/nowhere")),
        lambda: engine.loop.run_until_complete(engine.end_iteration()),
    ):
        with pytest.raises(EngineDead, match="rank 1"):
            call()


def stop_for_a_while(folder):
    """Rank 1, as soon as it is there: before the ranks have met."""
    while not (folder / "board.1").exists() or not (pid := Board.open(folder, 1).pid):
        time.sleep(0.001)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    os.kill(pid, signal.SIGCONT)


def delay_at_the_end(folder):
    """Rank 1, when the others have their weights and wait for it."""
    (folder / "fault").write_text('{"rank": 1, "phase": "start", "kind": "delay", "seconds": 6}')


@pytest.mark.parametrize("late", [stop_for_a_while, delay_at_the_end])
def test_a_rank_that_starts_late_is_waited_for_beyond_the_deadline_of_a_switch(model_folder, monkeypatch, late):
    begun = []

    def folder(name, needed):
        made = shared_folder(name, needed)
        begun.append(threading.Thread(target=late, args=(made,), daemon=True))
        begun[0].start()
        return made

    monkeypatch.setattr(api, "shared_folder", folder)
    begin = time.monotonic()
    engine = start(model_folder("qwen3"), tp_sizes=(1, 2), max_total_tokens=1024, deadline_s=2.0)
    try:
        assert not begun[0].is_alive()
        assert time.monotonic() - begin > 6
        output = engine.generate(input_ids=[5, 6, 7], sampling_params=LONG | {"max_new_tokens": 8})
        assert len(output["output_ids"]) == 8
        assert not (engine.settings.path / "fault").exists()
    finally:
        engine.shutdown()


def test_shutdown_ends_the_engines_processes_and_no_other(model_folder):
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        before = family()
        engine = start(model_folder("qwen3"), tp_sizes=(1, 2), max_total_tokens=1024)
        started = [process for process in family() if process not in before]
        assert len(started) >= 4  # two schedulers, controller, detokenizer
        engine.shutdown()
        assert not psutil.wait_procs(started, timeout=20)[1]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(10)


def test_a_killed_rank_ends_a_stream_while_wide(victim):
    engine = victim.engine
    engine.switch(2)
    victim.kill(engine.boards[1].pid)
    with pytest.raises(EngineDead) as error:
        for _ in engine.generate(input_ids=[5, 6, 7], sampling_params=LONG, stream=True):
            pass
    victim.check(error, "rank 1 ")


@pytest.mark.parametrize("victim", [{"policy": Threshold(2, 1)}], indirect=True)
def test_a_killed_rank_ends_all_that_waits_in_a_loop_with_a_policy(victim):
    engine = victim.engine
    driver = Driver(engine)

    async def run():
        requests = [asyncio.ensure_future(driver.request(job, 0.0)) for job in jobs((2000,) * 4)]
        await driver.progress(4, 4)
        update = asyncio.ensure_future(engine.async_update_weights_from_tensor([]))
        disk = asyncio.ensure_future(engine.tokenizer_manager.update_weights_from_disk(update_of("/nowhere")))
        victim.kill(engine.boards[0].pid)
        return await asyncio.wait_for(asyncio.gather(*requests, disk, update, return_exceptions=True), 60)

    outcomes = engine.loop.run_until_complete(run())
    assert time.monotonic() - victim.killed < WITHIN_S
    assert all(isinstance(outcome, EngineDead) and "rank 0 " in str(outcome) for outcome in outcomes[:-1])


def test_the_death_of_the_controller_is_told_in_any_event_loop(victim):
    engine = victim.engine
    pid = engine.get_all_child_pids()[0]

    async def run():
        victim.kill(pid)
        return await engine.async_generate(input_ids=[5, 6, 7], sampling_params=LONG)

    with pytest.raises(EngineDead) as error:
        asyncio.run(run())
    victim.check(error, f"the data-parallel controller (pid {pid})")


def test_a_failing_scheduler_ends_its_engine_and_not_its_users_process(victim):
    engine = victim.engine
    engine.settings.path.joinpath("fault").write_text('{"rank": 1, "phase": "rebind", "kind": "exception"}')
    with pytest.raises(EngineDead, match="rank 1"):
        engine.switch(2)


@pytest.mark.parametrize("which", ["rank", "controller"])
def test_a_process_that_ends_while_the_engine_starts(model_folder, monkeypatch, which):
    """The pids of SGLang's processes are known from what the plugin leaves as soon as it is loaded."""
    folders, before = [], api.shared_folder
    forgotten, unregister = [], atexit.unregister
    monkeypatch.setattr(
        atexit, "unregister", lambda function: (forgotten.append(function.__name__), unregister(function))
    )

    def shared_folder(purpose, needed):
        folders.append(before(purpose, needed))
        return folders[-1]

    def kill():
        wanted = "scheduler" if which == "rank" else "data_parallel"
        while True:
            for file in folders[0].glob("plugin.*") if folders else ():
                process = psutil.Process(int(file.suffix[1:]))
                if wanted in process.name() or wanted in " ".join(process.cmdline()):
                    killed.append(time.monotonic())
                    return process.kill()
            time.sleep(0.01)

    killed = []
    api.shared_folder = shared_folder
    threading.Thread(target=kill, daemon=True).start()
    try:
        with pytest.raises(EngineDead, match=rf"{which}|SGLang"):
            start(model_folder("qwen3"), tp_sizes=(1, 2), max_total_tokens=2048)
    finally:
        api.shared_folder = before
    assert time.monotonic() - killed[0] < 15
    assert not folders[0].exists()
    assert "shutdown" in forgotten  # at exit it would end what its user has started since
    left = [p for p in psutil.Process().children(recursive=True) if "sglang" in p.name()]
    assert not psutil.wait_procs(left, timeout=10)[1]
