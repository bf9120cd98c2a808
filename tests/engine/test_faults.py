"""A rank that fails in a switch: undone where it can be, else a clear error in time; never a wrong token."""

import asyncio
import json
import time

import psutil
import pytest

from pat.engine.errors import SwitchError, SwitchUndone
from tests.engine.conftest import Driver, Reference, family, ids, jobs, start

pytestmark = [pytest.mark.engine, pytest.mark.slow]

UNDOABLE = ("agree", "quiesce", "collect", "move")
FATAL = ("rebind", "resume")
DEADLINE_S = 3.0


def order(engine, **fault):
    engine.settings.path.joinpath("fault").write_text(json.dumps(fault))


@pytest.fixture(scope="module")
def driver(model_folder):
    folder = model_folder("qwen3")
    engine = start(folder, tp_sizes=(1, 2), max_total_tokens=2048, deadline_s=60.0)
    made = Driver(engine)
    made.reference = Reference(folder)
    yield made
    engine.shutdown()


@pytest.mark.parametrize("kind", ["exception", "memory"])
@pytest.mark.parametrize("phase", UNDOABLE)
@pytest.mark.parametrize(("tp_from", "rank"), [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_a_failure_before_rebind_is_undone_and_loses_nothing(driver, phase, kind, tp_from, rank):
    requests = jobs((60, 20, 60))
    engine = driver.engine
    engine.switch(tp_from)

    async def refused():
        await driver.progress(8, 3)
        order(engine, rank=rank, phase=phase, kind=kind)
        with pytest.raises(SwitchUndone, match=f"rank {rank}, phase {phase}"):
            await engine.async_switch(3 - tp_from, "migrate")
        assert engine.layout.tp == tp_from
        await engine.async_switch(3 - tp_from, "migrate")  # and the next one works

    outputs = driver.run(requests, during=refused)
    assert ids(outputs) == [driver.reference.greedy(job.prompt, job.tokens) for job in requests]


@pytest.mark.parametrize("phase", (*UNDOABLE, "exchange", *FATAL))
def test_a_rank_that_is_only_late_costs_time_and_nothing_else(driver, phase):
    requests = jobs((60, 20, 60))
    order(driver.engine, rank=1, phase=phase, kind="delay", seconds=0.3)
    outputs = driver.run(requests, switches=[(8, 2, "migrate")])
    assert ids(outputs) == [driver.reference.greedy(job.prompt, job.tokens) for job in requests]
    assert not driver.engine.settings.path.joinpath("fault").exists()


SAMPLE = {("move", "kill"), ("rebind", "exception"), ("collect", "delay"), ("exchange", "delay")}
ENDINGS = [
    pytest.param(phase, kind, marks=() if (phase, kind) in SAMPLE else (pytest.mark.matrix,))
    for phase in (*UNDOABLE, "exchange", *FATAL)
    for kind in ("kill", "delay", *(("exception",) if phase in FATAL else ()))
]


@pytest.mark.parametrize(("phase", "kind"), ENDINGS)
def test_a_rank_that_dies_or_stalls_ends_the_engine_with_an_error_in_time(model_folder, phase, kind):
    before = family()  # of another engine, which goes on
    engine = start(model_folder("qwen3"), tp_sizes=(1, 2), max_total_tokens=1024, deadline_s=DEADLINE_S)
    children = [process for process in family() if process not in before]
    shared = engine.settings.path
    try:
        driver = Driver(engine)

        async def run():
            work = [asyncio.ensure_future(driver.request(job, 0.0)) for job in jobs((900, 900))]
            await driver.progress(8, 2)
            order(engine, rank=1, phase=phase, kind=kind, seconds=600)
            begin = time.monotonic()
            switch = asyncio.ensure_future(engine.async_switch(2, "migrate"))
            done = await asyncio.wait_for(asyncio.gather(switch, *work, return_exceptions=True), 60)
            return done, time.monotonic() - begin

        outcomes, seconds = engine.loop.run_until_complete(run())
        # Every request fails or was answered in full; the switch itself may have been through on the other rank.
        for outcome in outcomes[1:]:
            assert isinstance(outcome, SwitchError) or len(outcome["output_ids"]) == 900
        errors = [str(outcome) for outcome in outcomes if isinstance(outcome, SwitchError)]
        assert errors
        assert all("rank 1" in error or "ranks [1]" in error for error in errors), errors
        assert seconds < 7 * DEADLINE_S + 10
        with pytest.raises(SwitchError):
            engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 4})
    finally:
        engine.shutdown()
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert not shared.exists()
    assert all(process.is_running() for process in before)
