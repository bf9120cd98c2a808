"""A stop that fails half-way and is tried again: what it changed of the scheduler comes back once and whole."""

from collections import deque
from types import SimpleNamespace

import pytest

from pat.engine import stop as module
from pat.engine.stop import Stop


class Scheduler:
    """Fails in ``pause_generation`` as often as told."""

    def __init__(self, failures: int, overlap: bool, paused: bool) -> None:
        self.failures, self.enable_overlap, self._engine_paused = failures, overlap, paused
        self.max_queued_requests = 7
        self.last_batch = SimpleNamespace(reqs=[])
        self.running_batch = SimpleNamespace(reqs=[])
        self.processed, self.calls = [], []
        if overlap:  # SGLang's other loop makes none
            self.result_queue = deque([("batch", "result")])

    def process_batch_result(self, *result):
        self.processed.append(result)

    def pause_generation(self, _):
        self.calls.append((self.enable_overlap, self.max_queued_requests))
        self._engine_paused = True
        if len(self.calls) <= self.failures:
            raise MemoryError("half-way")

    def continue_generation(self, _):
        self._engine_paused = False


@pytest.fixture(autouse=True)
def messages(monkeypatch):
    fake = SimpleNamespace(PauseGenerationReqInput=dict, ContinueGenerationReqInput=dict)
    monkeypatch.setattr(module, "sg", fake)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("failures", [0, 1])
def test_all_is_as_before_after_one_try_or_two(overlap, paused, failures):
    scheduler = Scheduler(failures, overlap, paused)
    stop = Stop(scheduler, SimpleNamespace(synchronize=lambda: None))
    for _ in range(failures):
        with pytest.raises(MemoryError):
            stop.now()
        assert not stop.done
    assert stop.now() == {}
    assert stop.done
    assert scheduler.calls == [(False, None)] * (failures + 1)  # retracted requests are not refused as new ones
    assert scheduler.processed == ([("batch", "result")] if overlap else [])
    stop.go_on()
    assert (scheduler.max_queued_requests, scheduler.enable_overlap, scheduler._engine_paused) == (7, overlap, paused)
