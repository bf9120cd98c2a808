"""Switches inside real SGLang: the same tokens as Hugging Face, whatever happens on the way."""

import asyncio

import pytest

from pat.engine.controller import Controller
from pat.layout import Layout
from pat.policy import Static, Threshold
from tests.engine.conftest import Driver, Reference, ids, jobs, logprobs, start

pytestmark = pytest.mark.engine

LENGTHS = (12, 12, 60, 12, 60, 60)
UP_DOWN_UP = [(16, 2, "{}"), (28, 1, "{}"), (40, 2, "{}")]


def plan(kv, steps=UP_DOWN_UP):
    return [(tokens, tp, kv) for tokens, tp, _ in steps]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def driver(request, model_folder):
    folder = model_folder(request.param)
    engine = start(folder, tp_sizes=(1, 2), max_total_tokens=1200, max_running_requests=32)
    made = Driver(engine)
    made.kind, made.reference = request.param, Reference(folder)
    yield made
    engine.shutdown()


@pytest.mark.parametrize("kv", ["migrate", "recompute"])
def test_greedy_tokens_are_hugging_faces_across_switches(driver, kv):
    requests = jobs(LENGTHS, shared_prompt=True)
    before = len(driver.engine.switches)
    outputs = driver.run(requests, switches=plan(kv))
    assert ids(outputs) == [driver.reference.greedy(job.prompt, job.tokens) for job in requests]
    records = [r for r in driver.engine.switches[before:] if r["unfinished"]]
    assert [(r["tp_from"], r["tp_to"], r["kv"]) for r in records] == [(1, 2, kv), (2, 1, kv), (1, 2, kv)]
    moved = [r["kv_tokens_moved"] for r in records]
    recomputed = [r["kv_tokens_recomputed"] for r in records]
    assert all(moved) and not any(recomputed) if kv == "migrate" else all(recomputed) and not any(moved)


@pytest.mark.parametrize("kv", ["migrate", "recompute"])
def test_sampled_tokens_do_not_depend_on_switches(driver, kv):
    requests = jobs(LENGTHS)
    static = driver.run(requests, temperature=1.0)
    switched = driver.run(requests, temperature=1.0, switches=plan(kv))
    assert ids(static) == ids(switched)
    assert ids(static) != [driver.reference.greedy(job.prompt, job.tokens) for job in requests]
    for job, output in zip(requests, switched, strict=True):
        forced = driver.reference.logprobs(job.prompt, output["output_ids"])
        assert len(logprobs(output)) == job.tokens
        assert max(abs(a - b) for a, b in zip(logprobs(output), forced, strict=True)) < 1e-4


def test_a_seed_decides_the_tokens(driver):
    (job,) = jobs((24,))
    first = ids(driver.run([job], temperature=1.0))
    assert ids(driver.run([job], temperature=1.0)) == first
    job.seed += 1
    assert ids(driver.run([job], temperature=1.0)) != first


def test_a_shared_prompt_moves_once(driver):
    alike, unlike = jobs((40, 40)), jobs((40, 40))
    alike[1].prompt = alike[0].prompt
    moved = []
    for requests in (alike, unlike):
        # Both start on tp 2, hence in one replica, and go to two; then the two come together again.
        driver.engine.switch(2)
        driver.run(requests, switches=[(8, 1, "migrate"), (16, 2, "migrate")], temperature=1.0)
        moved.append([r for r in driver.engine.switches if r["unfinished"]][-1]["kv_tokens_moved"])
    total = sum(len(job.prompt) for job in unlike) - sum(len(job.prompt) for job in alike)
    # Merging brings the prompt of `alike` once: about one prompt less than two separate ones, steps aside.
    assert moved[1] - moved[0] >= total + len(alike[0].prompt) - 12


def test_requests_that_arrive_while_wide_are_answered_right(driver):
    early, late = jobs((50, 50)), jobs((20, 30, 40))

    async def more():
        outputs.extend(await asyncio.gather(*[driver.request(job, 0.0) for job in late]))

    outputs = []
    driver.run(early, switches=[(8, 2, "migrate")], during=more)
    assert ids(outputs) == [driver.reference.greedy(job.prompt, job.tokens) for job in late]


@pytest.mark.parametrize("tp", [2, 1])
def test_requests_sent_in_the_same_moment_as_a_switch_are_answered_once(driver, tp):
    early, late = jobs((60, 60, 60)), jobs((20, 30, 20, 30))
    driver.engine.switch(3 - tp)

    async def at_once():
        switch = asyncio.ensure_future(driver.engine.async_switch(tp))
        work = []
        for job in late:
            work.append(asyncio.ensure_future(driver.request(job, 0.0)))
            await asyncio.sleep(0)
        await switch
        outputs.extend(await asyncio.gather(*work))

    outputs = []
    answers = driver.run(early, switches=[(6, 3 - tp, "migrate")], during=at_once)
    for requests, got in ((early, answers), (late, outputs)):
        assert ids(got) == [driver.reference.greedy(job.prompt, job.tokens) for job in requests]


def test_an_abort_while_wide_ends_one_request_and_no_other(driver):
    kept, aborted = jobs((40, 400))

    async def both():
        work = [
            asyncio.ensure_future(driver.request(kept, 0.0)),
            asyncio.ensure_future(driver.request(aborted, 0.0, rid="to-abort")),
        ]
        await driver.progress(8, 2)
        await driver.engine.async_switch(2)
        driver.engine.tokenizer_manager.abort_request(rid="to-abort")
        outputs = await asyncio.wait_for(asyncio.gather(*work), 60)
        await driver.engine.end_iteration()
        return outputs

    finished, ended = driver.engine.loop.run_until_complete(both())
    assert finished["output_ids"] == driver.reference.greedy(kept.prompt, kept.tokens)
    assert ended["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(ended["output_ids"]) < aborted.tokens


def test_kv_without_room_in_the_new_layout_is_computed_again(driver):
    # Wide, the pool holds twice the tokens of one rank: all five. Narrow, one of the ranks would have to hold three.
    requests = jobs((450,) * 5)
    driver.engine.switch(2)
    before = len(driver.engine.switches)
    outputs = driver.run(requests, switches=[(410, 1, "migrate")])
    assert ids(outputs) == [driver.reference.greedy(job.prompt, job.tokens) for job in requests]
    record = next(r for r in driver.engine.switches[before:] if r["unfinished"])
    assert record["unfinished"] == 5
    assert record["kv_tokens_moved"] > 4 * 410
    assert record["kv_tokens_recomputed"] > 410


def test_new_weights_are_used_at_every_size(driver, model_folder):
    other = model_folder(driver.kind, seed=7)
    requests, engine = jobs(LENGTHS), driver.engine
    old, new = driver.reference, Reference(other)
    for folder, reference in ((other, new), (old.folder, old)):
        engine.loop.run_until_complete(engine.update_weights(folder))
        expected = [reference.greedy(job.prompt, job.tokens) for job in requests]
        assert ids(driver.run(requests)) == expected
        assert ids(driver.run(requests, switches=plan("migrate"))) == expected
    assert [old.greedy(j.prompt, j.tokens) for j in requests] != [new.greedy(j.prompt, j.tokens) for j in requests]


def test_weights_that_come_while_wide_are_taken_at_the_base(driver, model_folder):
    folder = model_folder(driver.kind, seed=7)
    (job,), new, engine = jobs((20,)), Reference(folder), driver.engine
    for weights, reference in ((folder, new), (driver.reference.folder, driver.reference)):
        engine.switch(2)
        engine.loop.run_until_complete(engine.update_weights(weights))
        assert engine.layout == Layout(2, 1)
        engine.switch(2)
        assert ids(driver.run([job])) == [reference.greedy(job.prompt, job.tokens)]


def test_many_cycles_stay_exact(driver):
    requests = jobs((260, 260), shared_prompt=True)
    switches = [(4 * k, 2 if k % 2 else 1, ("migrate", "recompute", "auto")[k % 3]) for k in range(1, 61)]  # 30 cycles
    outputs = driver.run(requests, switches=switches)
    assert ids(outputs) == [driver.reference.greedy(job.prompt, job.tokens) for job in requests]


def test_a_switch_to_the_present_size_does_nothing(driver):
    before = len(driver.engine.switches)
    nothing = driver.engine.switch(1)
    assert (nothing["tp_from"], nothing["tp_to"], nothing["total_s"]) == (1, 1, 0.0)
    assert len(driver.engine.switches) == before
    with pytest.raises(ValueError, match="not one of this engine's tp_sizes"):
        driver.engine.switch(3)


def test_the_policy_switches_by_itself_and_the_next_stage_starts_at_the_base(driver):
    engine, requests = driver.engine, jobs(LENGTHS)
    expected = [driver.reference.greedy(job.prompt, job.tokens) for job in requests]
    for policy, live in ((Threshold(2, 3), 1), (Static(2), 0), (Static(1), 0)):
        engine.controller = Controller(engine, policy)
        try:
            engine.loop.run_until_complete(engine.begin_iteration())
            begun, before = engine.layout.tp, len(engine.switches)
            assert ids(driver.run(requests)) == expected
        finally:
            engine.controller = None
        assert begun == (2 if policy == Static(2) else 1)
        assert len([r for r in engine.switches[before:] if r["unfinished"]]) == live
        assert engine.layout.tp == 1
