"""Seeds inside real SGLang: neighbours and switches change no token, and n samples of one seed are n answers."""

import asyncio
from types import SimpleNamespace

import pytest

from pat.engine import sglang_api as sg
from pat.engine.sampling import next_sample
from tests.engine.conftest import Driver, Reference, ids, jobs, start

pytestmark = pytest.mark.engine

UP_DOWN = [(8, 2, "migrate"), (16, 1, "recompute"), (24, 2, "recompute"), (32, 1, "migrate")]
ROWS = [
    {},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"logit_bias": {"7": 3.0, "9": -3.0}},
]
PENALTIES = {"repetition_penalty": 1.5, "frequency_penalty": 0.5}


@pytest.fixture(scope="module", params=[True, False], ids=["one-batch", "overlap"])
def driver(request, model_folder):
    folder = model_folder("qwen3")
    # Prompts are prefilled in pieces, so that prefills and decodes of the same requests come in many mixtures.
    made = Driver(start(folder, tp_sizes=(1, 2), chunked_prefill_size=16, disable_overlap_schedule=request.param))
    made.reference = Reference(folder)
    yield made
    made.engine.shutdown()


def test_neighbours_and_switches_change_no_token(driver):
    rows = [*ROWS, PENALTIES]
    requests = jobs((48,) * len(rows))
    for job, params in zip(requests, rows, strict=True):
        job.params = params
    driver.engine.switch(1)
    alone = [driver.run([job], temperature=1.0)[0] for job in requests]
    together = driver.run(requests, temperature=1.0, switches=UP_DOWN)
    assert ids(together) == ids(alone)
    greedy = [driver.reference.greedy(job.prompt, job.tokens) for job in requests]
    is_greedy = [row.get("top_k") == 1 or row.get("temperature") == 0 for row in rows]
    assert [a == b for a, b in zip(ids(alone), greedy, strict=True)] == is_greedy
    for mine, beside in zip(alone, together, strict=True):  # a greedy one's temperature shows in neither
        pairs = zip(*(answer["meta_info"]["output_token_logprobs"] for answer in (mine, beside)), strict=True)
        assert max(abs(a[0] - b[0]) for a, b in pairs) < 1e-4


def samples(driver, prompts, params, switch=False):
    """The answers of one request of several samples a prompt."""

    async def call():
        answer = asyncio.ensure_future(driver.engine.async_generate(input_ids=prompts, sampling_params=params))
        if switch:
            for tokens, tp, kv in UP_DOWN:
                await driver.progress(tokens, 99)
                await driver.engine.async_switch(tp, kv)
        outputs = await asyncio.wait_for(answer, 120)
        await driver.engine.end_iteration()
        return ids(outputs)

    return driver.engine.loop.run_until_complete(call())


def test_samples_of_one_seed_are_different_and_the_same_again(driver):
    params = {"temperature": 1.0, "max_new_tokens": 48, "ignore_eos": True, "sampling_seed": 5}
    first, second = [3, 1, 4, 1, 5], [2, 7, 1, 8]
    four = samples(driver, first, params | {"n": 4})
    assert len({tuple(answer) for answer in four}) == 4
    assert samples(driver, first, params | {"n": 4}, switch=True) == four
    assert samples(driver, [first], [params])[0] == four[0]
    second_seed = params | {"sampling_seed": next_sample(5)}
    assert samples(driver, [first], second_seed)[0] == four[1]
    # Batches, with parameters for all prompts or for each.
    both = samples(driver, [first, second], params | {"n": 3})
    assert both[:3] == four[:3]
    assert len({tuple(answer) for answer in both}) == 6
    listed = samples(driver, [first, second], [params | {"n": 3}, params | {"n": 3, "sampling_seed": 6}], switch=True)
    assert listed[:3] == four[:3]
    assert not {tuple(answer) for answer in listed[3:]} & {tuple(answer) for answer in both}


def test_samples_without_a_seed_differ(driver):
    params = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, "n": 4}
    drawn = samples(driver, [3, 1, 4, 1, 5], params)
    assert len({tuple(answer) for answer in drawn}) == 4
    assert samples(driver, [3, 1, 4, 1, 5], params) != drawn


@pytest.mark.parametrize(
    ("given", "deterministic", "sent"),
    [
        (None, False, [None, None, None]),
        (None, True, [None, next_sample(42), next_sample(next_sample(42))]),
        (5, True, [5, next_sample(5), next_sample(next_sample(5))]),
    ],
)
def test_every_sample_of_a_request_is_sent_with_a_seed_of_its_own(monkeypatch, given, deterministic, sent):
    seen = []

    async def send(_, request):
        seen.append(request.sampling_params.sampling_seed)

    from pat.engine.tokenizer import TokenizerManager  # imports SGLang

    monkeypatch.setattr(sg.TokenizerManager, "_send_one_request", send)
    manager = object.__new__(TokenizerManager)
    manager.server_args = SimpleNamespace(enable_deterministic_inference=deterministic)
    request = SimpleNamespace(sampling_params=SimpleNamespace(n=3, sampling_seed=given))
    for _ in range(3):
        asyncio.run(manager._send_one_request(request))
    assert seen == sent


def test_seeds_of_samples_are_in_range_and_do_not_repeat():
    seeds = [-(2**63), -1, 0, 1, 2**63 - 1]
    for seed in seeds[:]:
        for _ in range(1000):
            seeds.append(seed := next_sample(seed))
    assert len(set(seeds)) == len(seeds) == 5005
    assert all(0 <= seed < 2**63 for seed in seeds[5:])
    assert next_sample(5) == 6146115891051340200  # a seed must mean the same tomorrow
