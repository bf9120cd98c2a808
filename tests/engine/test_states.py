"""Requests in every state at the moment of a switch: one answer each, and the right one."""

import asyncio
import random

import pytest

from tests.engine.conftest import Driver, Reference, ids, jobs, start

pytestmark = [pytest.mark.engine, pytest.mark.slow]
EAGER = {"tp_sizes": (1, 2)}  # SGLang admits what may not fit later


@pytest.fixture(
    scope="module",
    params=[
        EAGER,
        {"tp_sizes": (1, 2), "schedule_conservativeness": 1.0},  # admission by what each replica has learnt
        pytest.param({"tp_sizes": (1, 2, 4)}, marks=pytest.mark.matrix),
        pytest.param({"tp_sizes": (1, 2), "disable_overlap_schedule": False}, marks=pytest.mark.matrix),
        pytest.param({"tp_sizes": (1, 2), "disable_radix_cache": True}, marks=pytest.mark.matrix),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def driver(request, model_folder):
    """Three requests and 300 tokens a rank: of what the tests send, much waits, and SGLang retracts some."""
    folder = model_folder("qwen3")
    options = {"max_running_requests": 3 * max(request.param["tp_sizes"]), "chunked_prefill_size": 16}
    options["schedule_conservativeness"] = 0.01  # admit what may not fit later
    engine = start(folder, max_total_tokens=300, **options | request.param)
    made = Driver(engine)
    made.reference = Reference(folder)
    yield made
    engine.shutdown()


async def until(driver, condition):
    """The live requests once they fulfil ``condition``."""
    for _ in range(10_000):
        rows = [row for replica in driver.engine.live_rows() for row in replica]
        if rows and condition(rows):
            return rows
        await asyncio.sleep(0.001)
    raise TimeoutError(f"not seen: {condition}; live: {rows}")


def test_waiting_requests_are_carried_along(driver):
    requests = jobs((40,) * 20)
    at_the_switch = []

    async def early():
        await until(driver, lambda rows: len(rows) > 12 and max(row[2] for row in rows) >= 8)
        at_the_switch.append((await driver.engine.async_switch(2, "migrate"))["unfinished"])

    outputs = driver.run(requests, during=early)
    assert ids(outputs) == [driver.reference.greedy(job.prompt, job.tokens) for job in requests]
    assert at_the_switch[0] > 3 * 2  # more than run at once


@pytest.mark.parametrize("driver", [EAGER], indirect=True)
def test_retracted_requests_keep_what_they_have_generated(driver):
    # A pool of 300 tokens does not hold three requests of up to 220: SGLang takes one out while the others decode.
    requests = jobs((210,) * 6)
    for job in requests:
        job.params = {"ignore_eos": False}  # which may end it early, so that SGLang does not reserve all of its budget
    seen = []

    async def when_out():
        for tp in (2, 1):
            rows = await until(driver, lambda rows: sum(row[1] + row[2] for row in rows) > 610)
            seen.append(len(rows))
            await driver.engine.async_switch(tp)

    outputs = driver.run(requests, during=when_out)
    expected = [driver.reference.greedy(job.prompt, job.tokens) for job in requests]
    assert ids(outputs) == [t[: t.index(1) + 1] if 1 in t else t for t in expected]  # 1 ends a response
    assert [len(tokens) for tokens in ids(outputs)].count(210) > 3  # the budget is not granted anew
    assert min(seen) > 3  # 610 tokens of them are more than the 600 that the two pools hold: some are out


@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=pytest.mark.matrix), pytest.param(3, marks=pytest.mark.matrix)]
)
def test_requests_that_come_go_and_end_at_any_moment_get_one_answer_each(driver, seed):
    rng, engine = random.Random(seed), driver.engine
    requests = jobs([rng.choice((1, 2, 3, 17, 40, 90)) for _ in range(40)], shared_prompt=seed == 2)
    for job in requests[::2]:
        job.params = {"ignore_eos": False}  # 1 ends a response
    aborted = set(rng.sample(range(40), 10))
    sizes = engine.settings.tp_sizes

    async def one(number, job):  # SGLang aborts every request whose id begins with the one that is given
        await asyncio.sleep(rng.random() * 2.0)
        answer = asyncio.ensure_future(driver.request(job, 0.0, rid=f"{seed}-{number:02d}"))
        if number in aborted:
            await asyncio.sleep(rng.random() * 0.1)
            engine.tokenizer_manager.abort_request(rid=f"{seed}-{number:02d}")
        return await answer

    async def switching(until):
        while not until.done():
            await asyncio.sleep(rng.random() * 0.05)
            await engine.async_switch(rng.choice(sizes), rng.choice(("migrate", "recompute", "auto")))

    async def run():
        all_of_it = asyncio.gather(*[one(n, job) for n, job in enumerate(requests)])
        await asyncio.wait_for(asyncio.gather(all_of_it, switching(all_of_it)), 120)
        await engine.end_iteration()
        return all_of_it.result()

    before = len(engine.switches)
    outputs = engine.loop.run_until_complete(run())
    for number, (job, output) in enumerate(zip(requests, outputs, strict=True)):
        expected = driver.reference.greedy(job.prompt, job.tokens)
        if job.params and 1 in expected:
            expected = expected[: expected.index(1) + 1]
        reason = output["meta_info"]["finish_reason"]["type"]
        assert output["output_ids"] == expected[: len(output["output_ids"])]
        if number not in aborted:
            assert output["output_ids"] == expected
            assert reason in ("length", "stop")
        else:
            assert reason in ("abort", "length", "stop")
    assert [r for r in engine.switches[before:] if r["unfinished"]]
    assert engine.in_flight == 0
    assert engine.progress()[0] == 0
