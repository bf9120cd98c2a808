"""Any mix of requests under any schedule: whatever is held up, every answer is that of its request alone.

Loops, detokenizer, controller and ranks stand still at random while requests of all kinds come, go and are aborted,
the layout changes and new weights arrive. One number makes all of it, timing apart.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass, field

import pytest

from tests.engine.conftest import start, update_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

REQUESTS = 40
ARRIVE_S = 3.0  # within which all requests are sent
DEADLINE_S = 240
CONFIGURATIONS = {
    "ids": {"tp_sizes": (1, 2)},
    "text": {"tp_sizes": (1, 2), "skip_tokenizer_init": False},
    "four": {"tp_sizes": (1, 2, 4), "max_running_requests": 16, "chunked_prefill_size": 16},
    "overlap": {"tp_sizes": (1, 2), "disable_overlap_schedule": False, "skip_tokenizer_init": False},
    "no-cache": {"tp_sizes": (1, 2), "disable_radix_cache": True, "chunked_prefill_size": 8},
}
CASES = [
    pytest.param(name, seed, id=f"{name}-{seed}", marks=[] if (name, seed) == ("text", 1) else pytest.mark.matrix)
    for name in CONFIGURATIONS
    for seed in range(1, 5)
]


@dataclass
class Request:
    """One request; ``answer`` and ``weights``, numbers of all that were in use while it was there, come later."""

    rid: str
    prompt: list[int]
    params: dict
    arrives_s: float
    stream: bool
    aborted_after_s: float | None
    answer: dict | None = None
    weights: set[int] = field(default_factory=set)
    expected: dict[int, tuple] = field(default_factory=dict)


def a_request(rng: random.Random, number: int, options) -> Request:
    params = {
        "sampling_seed": rng.randrange(1 << 31),
        "temperature": rng.choice((0.0, 0.7, 1.0, 1.3)),
        "max_new_tokens": rng.choice((1, 2, 9, 30, 80, 200)),
        "ignore_eos": rng.random() < 0.7,
    }
    extra = [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9}]
    extra += [{"stop_token_ids": [7, 30, 61]}]
    if not options.skip_tokenizer_init:
        extra += [{"min_new_tokens": min(8, params["max_new_tokens"])}]
    if options.disable_overlap_schedule:
        extra += [{"frequency_penalty": 0.8}, {"presence_penalty": 0.5, "repetition_penalty": 1.3}]
    shared = [3 + j % 40 for j in range(rng.choice((0, 24)))]
    return Request(
        rid=f"request-{number:03d}",
        prompt=shared + [3 + rng.randrange(40) for _ in range(rng.randrange(1, 30))],
        params=params | rng.choice(extra),
        arrives_s=rng.random() * ARRIVE_S,
        stream=rng.random() < 0.5,
        aborted_after_s=rng.random() if rng.random() < 0.15 else None,
    )


class Chaos:
    """Everything that goes on around the requests, until they are answered."""

    def __init__(self, engine, rng: random.Random, folders: list[str]) -> None:
        self.engine, self.rng, self.folders = engine, rng, folders
        self.weights = [{0}]  # what may be in use, from the beginning to now
        self.ended = asyncio.Event()
        self.pids = [board.pid for board in engine.boards] + [p.pid for p in engine.watch._started.values()]

    async def until_ended(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), seconds)

    async def switches(self) -> None:
        while not self.ended.is_set():
            await self.until_ended(self.rng.random() * 0.4)
            kv = self.rng.choice(("migrate", "recompute", "auto"))
            if self.rng.random() < 0.3:
                await self.engine.async_rebalance(kv)
            else:
                await self.engine.async_switch(self.rng.choice(self.engine.settings.tp_sizes), kv)

    async def the_loop_stands_still(self) -> None:
        while not self.ended.is_set():
            await self.until_ended(self.rng.random() * 0.5)
            time.sleep(self.rng.random() * 0.25)

    async def processes_stand_still(self) -> None:
        while not self.ended.is_set():
            await self.until_ended(self.rng.random() * 0.3)
            pid = self.rng.choice(self.pids)
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(self.rng.random() * 0.2)
            finally:
                os.kill(pid, signal.SIGCONT)

    async def new_weights(self) -> None:
        """Twice: to the other checkpoint, and back."""
        for number in (1, 0):
            await self.until_ended(ARRIVE_S / 4)
            self.weights.append({0, 1})
            done = await self.engine.tokenizer_manager.update_weights_from_disk(update_of(self.folders[number]))
            assert done[0], done[1]
            self.weights.append({number})

    async def flushes(self) -> None:
        while not self.ended.is_set():
            await self.until_ended(1.0)
            await self.engine.tokenizer_manager.flush_cache(timeout_s=self.rng.random())


async def ask(engine, request: Request) -> dict:
    made = await engine.async_generate(
        rid=request.rid,
        input_ids=request.prompt,
        sampling_params=request.params,
        return_logprob=True,
        stream=request.stream,
    )
    if not request.stream:
        return made
    async for chunk in made:
        last = chunk | {"output_ids": list(chunk["output_ids"])}
    return last


async def under(chaos: Chaos, requests: list[Request]) -> None:
    engine = chaos.engine

    async def one(request: Request) -> None:
        await asyncio.sleep(request.arrives_s)
        before = len(chaos.weights) - 1
        work = asyncio.ensure_future(ask(engine, request))
        if request.aborted_after_s is not None:
            await asyncio.sleep(request.aborted_after_s)
            engine.tokenizer_manager.abort_request(rid=request.rid)
        request.answer = await work
        request.weights = set().union(*chaos.weights[before:])

    around = [chaos.switches(), chaos.the_loop_stands_still(), chaos.processes_stand_still(), chaos.flushes()]
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        for each in around:
            tasks.create_task(each)
        updates = tasks.create_task(chaos.new_weights())
        await asyncio.gather(*[one(request) for request in requests], updates)
        chaos.ended.set()


async def alone(engine, requests: list[Request], folders: list[str]) -> None:
    """What each request is answered by itself, at the base size, under each checkpoint."""
    for number, folder in list(enumerate(folders))[::-1]:
        await engine.update_weights(folder)
        for request in requests:
            request.expected[number] = result(await ask(engine, request))


def result(answer: dict) -> tuple:
    info = answer["meta_info"]
    return answer["output_ids"], answer.get("text"), info["finish_reason"]["type"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from pat.assets import models

    made = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("weights")
        models.write("tiny-qwen3", "float32", (1, 2, 4), seed, folder)
        made.append(str(folder))
    return made


@pytest.fixture(scope="module")
def engines(folders):
    """start(configuration); one at a time."""
    running = {}

    def get(name: str):
        if name not in running:
            for old in list(running):
                running.pop(old).shutdown()
            running[name] = start(folders[0], max_total_tokens=2048, **CONFIGURATIONS[name])
        return running[name]

    yield get
    for engine in running.values():
        engine.shutdown()


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_every_answer_is_that_of_its_request_alone(engines, folders, name, seed):
    engine, rng = engines(name), random.Random(seed)
    requests = [a_request(rng, number, engine.server_args) for number in range(REQUESTS)]
    engine.loop.run_until_complete(alone(engine, requests, folders))
    before = len(engine.switches)
    chaos = Chaos(engine, rng, folders)
    engine.loop.run_until_complete(under(chaos, requests))
    for request in requests:
        ids, text, reason = result(request.answer)
        expected = [request.expected[number] for number in request.weights]
        if request.aborted_after_s is None or reason != "abort":
            assert (ids, text, reason) in expected, request
        else:
            assert ids in [tokens[: len(ids)] for tokens, *_ in expected], request
    assert engine.in_flight == 0
    assert [record for record in engine.switches[before:] if record["unfinished"]]
    engine.loop.run_until_complete(engine.end_iteration())
