"""Methods of sglang.Engine on a real engine, while narrow and while wide."""

import asyncio

import pytest
import torch

from pat.assets import models
from pat.layout import Layout
from tests.engine.conftest import Driver, start

pytestmark = pytest.mark.engine

PROMPT = "What is 7 + 5?"
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
SIZES = pytest.mark.parametrize("tp", [1, 2])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """An engine with a tokenizer: one token a character."""
    folder = tmp_path_factory.mktemp("text")
    models.write("tiny-qwen3", "float32", (1, 2), 0, folder)
    engine = start(str(folder), tp_sizes=(1, 2), max_total_tokens=2048, skip_tokenizer_init=False)
    engine.expected = engine.generate(PROMPT, GREEDY)["text"]
    yield engine
    engine.shutdown()


@SIZES
def test_a_batch_with_parameters_of_its_own_and_several_samples_each(text, tp):
    text.switch(tp)
    one = text.generate(PROMPT, GREEDY)
    assert one["text"] == text.expected
    assert len(one["output_ids"]) == 24
    long, short = text.generate([PROMPT] * 2, [GREEDY, GREEDY | {"max_new_tokens": 5}])
    assert long["text"] == text.expected
    assert short["output_ids"] == long["output_ids"][:5]
    samples = text.generate([PROMPT, PROMPT], GREEDY | {"n": 2})
    assert [out["text"] for out in samples] == [text.expected] * 4


@SIZES
def test_a_stream_and_a_stop_string(text, tp):
    text.switch(tp)
    chunks = [chunk["text"] for chunk in text.generate(PROMPT, GREEDY, stream=True)]
    assert len(chunks) > 3
    assert chunks[-1] == text.expected
    assert all(text.expected.startswith(chunk) for chunk in chunks)
    stop = text.expected[10:13]
    ended = text.generate(PROMPT, GREEDY | {"stop": [stop]})
    assert ended["text"] == text.expected[: text.expected.index(stop)]
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_scores_are_those_of_every_size(text):
    scores = []
    for tp in (1, 2):
        text.switch(tp)
        scores.append(text.score(query="7 + 5 = ", items=["12", "13"], label_token_ids=[10, 20], apply_softmax=True))
    a, b = (torch.tensor(getattr(result, "scores", result)) for result in scores)
    assert a.shape == (2, 2)
    assert torch.allclose(a, b, atol=1e-5)


@SIZES
def test_cache_server_info_and_garbage(text, tp):
    text.switch(tp)
    text.generate(PROMPT, GREEDY)
    assert text.flush_cache().success
    assert text.generate(PROMPT, GREEDY)["meta_info"]["cached_tokens"] == 0
    info = text.get_server_info()
    assert (info["tp_size"], info["dp_size"], len(info["internal_states"])) == (1, 2, 2)
    assert all(state["memory_usage"]["token_capacity"] for state in info["internal_states"])
    assert text.get_model_info()["model_path"] == text.server_args.model_path
    text.freeze_gc()
    assert text.generate(PROMPT, GREEDY)["text"] == text.expected


@SIZES
def test_a_profile_of_every_rank(text, tp, tmp_path):
    text.switch(tp)
    text.start_profile(output_dir=str(tmp_path), activities=["CPU"], with_stack=False)
    assert text.generate(PROMPT, GREEDY)["text"] == text.expected
    text.stop_profile()
    assert len(list(tmp_path.glob("*.trace.json.gz"))) == 2


@SIZES
def test_what_is_refused_of_a_request_leaves_nothing_behind(text, tp):
    text.switch(tp)
    with pytest.raises(ValueError, match=r"json_schema.*not supported"):
        text.generate(PROMPT, GREEDY | {"json_schema": "{}"})
    with pytest.raises(ValueError, match="image_data is not supported"):
        text.generate(PROMPT, GREEDY, image_data="x.png")
    with pytest.raises(ValueError, match=r"regex.*not supported"):
        text.loop.run_until_complete(text.async_generate([PROMPT] * 2, [GREEDY, GREEDY | {"regex": "a+"}]))
    with pytest.raises(ValueError, match="embedding"):
        text.encode(PROMPT)
    with pytest.raises(ValueError, match="embedding"):
        text.rerank([[PROMPT, PROMPT]])
    assert text.in_flight == 0
    assert text.generate(PROMPT, GREEDY)["text"] == text.expected


def test_another_event_loop_is_an_error_and_not_a_wait_for_ever(text):
    async def call():
        return await text.async_generate(PROMPT, GREEDY)

    with pytest.raises(RuntimeError, match="in one loop"):
        asyncio.run(call())
    assert text.generate(PROMPT, GREEDY)["text"] == text.expected


def test_a_switch_that_nobody_waits_for_any_more_comes_to_its_end(text):
    text.switch(1)

    async def cancelled():
        switch = asyncio.ensure_future(text.async_switch(2))
        await asyncio.sleep(0.001)
        switch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await switch
        async with text.switching:
            return text.layout

    assert text.loop.run_until_complete(cancelled()) == Layout(2, 2)
    assert text.generate(PROMPT, GREEDY)["text"] == text.expected


def test_least_lengths_stop_tokens_and_stop_strings_hold_across_switches(text):
    text.switch(1)
    seeded = {"temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
    free = text.generate(PROMPT, seeded | {"max_new_tokens": 400})
    stops = sorted(set(free["output_ids"][:4]))  # without min_new_tokens the first token would end it
    least = seeded | {"max_new_tokens": 800, "min_new_tokens": 250, "stop_token_ids": stops, "ignore_eos": False}
    wanted = range(len(free["text"]) * 3 // 4, len(free["text"]))  # some tokens are several characters
    ends = next(free["text"][i : i + 4] for i in wanted if free["text"].index(free["text"][i : i + 4]) == i)
    string = seeded | {"max_new_tokens": 400, "stop": [ends]}
    alone = [text.generate(PROMPT, params) for params in (least, string)]

    async def switched(params):
        answer = asyncio.ensure_future(text.async_generate(PROMPT, params))
        for tokens, tp in ((4, 2), (40, 1), (90, 2)):
            await Driver(text).progress(tokens, 1)
            await text.async_switch(tp, "migrate")
        return await answer

    for params, before in zip((least, string), alone, strict=True):
        text.switch(1)
        after = text.loop.run_until_complete(switched(params))
        assert (after["text"], after["output_ids"]) == (before["text"], before["output_ids"])
        assert after["meta_info"]["finish_reason"] == before["meta_info"]["finish_reason"]
    assert alone[0]["meta_info"]["finish_reason"]["type"] == "stop"
    assert len(alone[0]["output_ids"]) >= 250
    assert not set(alone[0]["output_ids"][:249]) & set(stops)
    assert alone[1]["meta_info"]["finish_reason"]["type"] == "stop"
