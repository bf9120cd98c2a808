"""Answers are the static run's whatever lags, and a request that cannot be answered ends no other."""

import asyncio
import os
import signal
import time

import pytest

from pat.assets import models
from tests.engine.conftest import start

pytestmark = pytest.mark.engine

TOKENS = 400
PROMPTS = [[3 + (7 * i + 3 * j) % 40 for j in range(9 + i)] for i in range(4)]


@pytest.fixture(scope="module", params=[True, False], ids=["ids", "text"])
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    models.write("tiny-qwen3", "float32", (1, 2), 0, folder)
    made = start(str(folder), tp_sizes=(1, 2), max_total_tokens=8192, skip_tokenizer_init=request.param)
    yield made
    made.shutdown()


def run(engine, work):
    return engine.loop.run_until_complete(asyncio.wait_for(work, 120))


async def answer(engine, prompt, stream, **options):
    """The last answer to ``prompt``, all of whose chunks begin as the one before did."""
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    made = await engine.async_generate(input_ids=prompt, sampling_params=params, stream=stream, **options)
    if not stream:
        return made
    last = None
    async for chunk in made:
        if last is not None:
            assert chunk["output_ids"][: len(last["output_ids"])] == last["output_ids"]
        last = chunk | {"output_ids": list(chunk["output_ids"])}
    return last


def contents(outputs):
    return [(out["output_ids"], out.get("text")) for out in outputs]


async def gather(engine, stream, meanwhile=None):
    work = [asyncio.ensure_future(answer(engine, prompt, stream)) for prompt in PROMPTS]
    if meanwhile:
        await meanwhile()
    return contents(await asyncio.gather(*work))


async def some_steps(engine, tokens):
    while min((row[2] for rows in engine.live_rows() for row in rows), default=0) < tokens:
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_loop_that_stands_still_around_a_switch(engine, stream):
    static = run(engine, gather(engine, stream))
    assert all(len(tokens) == TOKENS for tokens, _ in static)

    async def meanwhile():
        for tp in (2, 1, 2):
            await some_steps(engine, 20)
            time.sleep(0.15)  # answers pile up in the sockets
            switch = asyncio.ensure_future(engine.async_switch(tp))
            await asyncio.sleep(0.01)
            time.sleep(0.3)
            await switch

    assert run(engine, gather(engine, stream, meanwhile)) == static
    run(engine, engine.async_switch(1))


@pytest.mark.parametrize("engine", [False], indirect=True, ids=["text"])
def test_a_detokenizer_that_stands_still_around_a_switch(engine):
    static = run(engine, gather(engine, True))
    pid = next(p.pid for p in engine.watch._started.values() if "detokenizer" in engine.watch._names[p.pid])

    async def meanwhile():
        for tp in (2, 1, 2):
            await some_steps(engine, 20)
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(0.15)
                await engine.async_switch(tp)
                await asyncio.sleep(0.15)
            finally:
                os.kill(pid, signal.SIGCONT)

    assert run(engine, gather(engine, True, meanwhile)) == static
    run(engine, engine.async_switch(1))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("ids", "where"), [([3, 10_000_000], "token 1 .* 10000000"), ([-1, 3], "token 0 .* -1")])
def test_a_token_that_the_model_does_not_know_is_refused_for_its_request_only(engine, tp, ids, where):
    run(engine, engine.async_switch(tp))
    good = asyncio.ensure_future(answer(engine, PROMPTS[0], False), loop=engine.loop)
    with pytest.raises(ValueError, match=where):
        run(engine, answer(engine, ids, False))
    vocabulary = engine.tokenizer_manager.model_config.vocab_size
    with pytest.raises(ValueError, match=f"id {vocabulary}; this model's are 0 to {vocabulary - 1}"):
        run(engine, answer(engine, [3, vocabulary], False))
    assert len(run(engine, good)["output_ids"]) == TOKENS
    assert engine.in_flight == 0


@pytest.mark.parametrize("ids", [[], [[3, 4], []]])
def test_an_empty_prompt_is_refused(engine, ids):
    with pytest.raises(ValueError, match="empty"):
        run(engine, answer(engine, ids, False))
    assert engine.in_flight == 0


def test_a_flush_that_waits_for_the_last_request_survives_a_switch(engine):
    async def flushing():
        work = [asyncio.ensure_future(answer(engine, prompt, False)) for prompt in PROMPTS]
        await some_steps(engine, 5)
        flush = asyncio.ensure_future(engine.tokenizer_manager.flush_cache(timeout_s=60))
        none = await engine.tokenizer_manager.flush_cache()
        await engine.async_switch(2)
        assert not flush.done()
        first = contents(await asyncio.gather(*work))
        assert (none.success, (await flush).success) == (False, True)
        again = await asyncio.gather(*[answer(engine, prompt, False) for prompt in PROMPTS])
        assert [out["meta_info"]["cached_tokens"] for out in again] == [0] * len(PROMPTS)
        assert contents(again) == first
        late = asyncio.ensure_future(answer(engine, PROMPTS[0], False))
        await some_steps(engine, 5)
        assert not (await engine.tokenizer_manager.flush_cache(timeout_s=0.1)).success
        await late
        await engine.async_switch(1)

    run(engine, flushing())


@pytest.mark.parametrize("kv", ["recompute", "migrate"])
def test_hidden_states_are_those_of_the_static_run(model_folder, kv, hidden):
    requests = [[3 + i, 4, 5, 6 + i] for i in range(3)]
    params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}

    async def all_of_them(switches=()):
        work = [
            asyncio.ensure_future(
                hidden.async_generate(input_ids=ids, sampling_params=params, return_hidden_states=True)
            )
            for ids in requests
        ]
        for tokens, tp in switches:
            await some_steps(hidden, tokens)
            await hidden.async_switch(tp, kv)
        return [vectors(out) for out in await asyncio.gather(*work)]

    static = run(hidden, all_of_them())
    switched = run(hidden, all_of_them([(10, 2), (25, 1), (40, 2)]))
    run(hidden, hidden.async_switch(1))
    assert [len(rows) for rows in static] == [len(rows) for rows in switched] == [4 + 63] * 3
    for one, other in zip(static, switched, strict=True):
        assert max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)) < 1e-3


def vectors(output):
    """[tokens of the prompt and the response but the last, hidden]: SGLang nests those of the prompt."""
    rows = []
    for entry in output["meta_info"]["hidden_states"]:
        rows.extend(entry if isinstance(entry[0], list) else [entry])
    return rows


@pytest.fixture(scope="module")
def hidden(model_folder):
    made = start(model_folder("qwen3"), tp_sizes=(1, 2), max_total_tokens=4096, enable_return_hidden_states=True)
    yield made
    made.shutdown()
