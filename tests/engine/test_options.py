"""Options of SGLang that rollouts use, across switches: the same answers as from a run that never switches."""

import asyncio

import pytest

from tests.engine.conftest import Driver, Reference, ids, jobs, logprobs, start

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = (12, 160, 30, 160)
SWITCHES = [(14, 2, "migrate"), (40, 1, "recompute"), (70, 2, "migrate")]


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"disable_radix_cache": True},
        {"disable_overlap_schedule": False},
        {"chunked_prefill_size": 4},
        pytest.param(
            {"disable_radix_cache": True, "disable_overlap_schedule": False, "chunked_prefill_size": 4},
            marks=pytest.mark.matrix,
        ),
    ],
    ids=lambda options: "-".join(options) or "default",
)
def driver(request, model_folder):
    folder = model_folder("qwen3")
    engine = start(folder, tp_sizes=(1, 2), max_total_tokens=2048, **request.param)
    made = Driver(engine)
    made.reference = Reference(folder)
    yield made
    engine.shutdown()


@pytest.mark.parametrize("kv", ["migrate", "recompute", "auto"])
def test_tokens_and_log_probs_are_hugging_faces(driver, kv):
    requests = jobs(LENGTHS, shared_prompt=True)
    outputs = driver.run(requests, switches=[(tokens, tp, kv) for tokens, tp, _ in SWITCHES])
    assert ids(outputs) == [driver.reference.greedy(job.prompt, job.tokens) for job in requests]
    for job, output in zip(requests, outputs, strict=True):
        forced = driver.reference.logprobs(job.prompt, output["output_ids"])
        assert len(logprobs(output)) == job.tokens
        assert max(abs(a - b) for a, b in zip(logprobs(output), forced, strict=True)) < 1e-4


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
        {"top_k": 5},
        {"top_p": 0.6},
        {"stop_token_ids": list(range(3, 500, 25))},
    ],
    ids=lambda params: "-".join(params),
)
def test_sampling_parameters(driver, params):
    requests = jobs(LENGTHS)
    for job in requests:
        job.params = params | ({"ignore_eos": False} if "stop_token_ids" in params else {})
    static = driver.run(requests, temperature=1.0)
    # With stop tokens few requests may live long enough: switch at the number of tokens, not of requests.
    switched = driver.run(
        requests, temperature=1.0, switches=SWITCHES if "stop_token_ids" not in params else SWITCHES[:0]
    )
    if "stop_token_ids" in params:
        switched = _switch_soon(driver, requests)
    assert ids(static) == ids(switched)
    assert [o["meta_info"]["finish_reason"] for o in static] == [o["meta_info"]["finish_reason"] for o in switched]


def _switch_soon(driver, requests):
    async def run():
        work = [asyncio.ensure_future(driver.request(job, 1.0)) for job in requests]
        for tp in (2, 1, 2, 1, 2):
            await asyncio.sleep(0.02)
            await driver.engine.async_switch(tp)
        outputs = await asyncio.wait_for(asyncio.gather(*work), 60)
        await driver.engine.end_iteration()
        return outputs

    return driver.engine.loop.run_until_complete(run())


def test_top_and_prompt_log_probs(driver):
    requests = jobs((160, 160))
    for job in requests:
        job.options = {"top_logprobs_num": 3, "logprob_start_len": 0}
    static, switched = driver.run(requests), driver.run(requests, switches=SWITCHES)
    for one, other, job in zip(static, switched, requests, strict=True):
        for key in ("input_token_logprobs", "input_top_logprobs", "output_top_logprobs"):
            a, b = one["meta_info"][key], other["meta_info"][key]
            assert len(a) == len(b) == (len(job.prompt) if key.startswith("input") else job.tokens)
        for a, b in zip(
            one["meta_info"]["input_token_logprobs"], other["meta_info"]["input_token_logprobs"], strict=True
        ):
            assert a[1] == b[1]
            assert a[0] is b[0] is None or abs(a[0] - b[0]) < 1e-4
        forced = driver.reference.logprobs(job.prompt[:1], job.prompt[1:])
        prompt = [entry[0] for entry in other["meta_info"]["input_token_logprobs"]][1:]
        assert max(abs(x - y) for x, y in zip(prompt, forced, strict=True)) < 1e-4
        tops = zip(one["meta_info"]["output_top_logprobs"], other["meta_info"]["output_top_logprobs"], strict=True)
        for a, b in tops:
            assert [token for _, token, _ in a] == [token for _, token, _ in b]
            assert max(abs(x[0] - y[0]) for x, y in zip(a, b, strict=True)) < 1e-4


def test_a_stream_has_no_gap_and_nothing_twice(driver):
    (job,) = jobs((60,))

    async def stream():
        got = []
        generator = await driver.engine.async_generate(
            input_ids=job.prompt,
            sampling_params={"temperature": 0, "max_new_tokens": job.tokens, "ignore_eos": True},
            stream=True,
        )
        switches = {10: 2, 25: 1, 40: 2}
        async for chunk in generator:
            got.append(chunk)
            for at in [at for at in switches if len(chunk["output_ids"]) >= at or len(got) >= at]:
                await driver.engine.async_switch(switches.pop(at))
        await driver.engine.end_iteration()
        return got

    chunks = driver.engine.loop.run_until_complete(asyncio.wait_for(stream(), 60))
    assert chunks[-1]["output_ids"] == driver.reference.greedy(job.prompt, job.tokens)
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(lengths)


def test_a_prompt_longer_than_a_chunk_is_in_the_middle_of_its_prefill_at_a_switch(driver):
    short, long = jobs((60, 20))
    long.prompt = [(5 * i) % 490 + 3 for i in range(600)]

    async def late():
        outputs.append(asyncio.ensure_future(driver.request(long, 0.0)))
        for tp in (1, 2, 1, 2):
            await asyncio.sleep(0.01)
            await driver.engine.async_switch(tp)
        outputs[0] = await asyncio.wait_for(outputs[0], 60)

    outputs = []
    first = driver.run([short], switches=[(8, 2, "migrate")], during=late)
    assert ids(first) == [driver.reference.greedy(short.prompt, short.tokens)]
    assert ids(outputs) == [driver.reference.greedy(long.prompt, long.tokens)]
