"""A checkpoint with several end tokens, through the assets stage into a real engine: each of them ends a response."""

import json

import pytest

from pat.assets import models
from tests.engine.conftest import start

pytestmark = pytest.mark.engine

PROMPTS = [[7, 20, 33], [60, 61, 62, 63], [40, 90, 41]]
TOKENS = 24
SIZES = pytest.mark.parametrize("tp", [1, 2])


def first_at(responses, number):
    """(place, token) in the response ``number``: its first token that no other has before, from the fourth on."""
    taken = {token for other in responses for token in other[:4]}
    return next((i, token) for i, token in enumerate(responses[number]) if i > 3 and token not in taken)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """An engine on a model whose files name one end token each: tokens that its greedy responses come to."""
    folder = tmp_path_factory.mktemp("ends")
    models.write("tiny-qwen3", "float32", (1, 2), 0, folder / "plain")
    free = start(str(folder / "plain"), tp_sizes=(1, 2), max_total_tokens=2048)
    greedy = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    responses = [out["output_ids"] for out in free.generate(input_ids=PROMPTS, sampling_params=greedy)]
    free.shutdown()
    named = [first_at(responses, 0)[1], first_at(responses, 1)[1]]
    for name, token in zip(("generation_config.json", "config.json"), named, strict=True):
        file = folder / "plain" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [0, token]}))
    models.write(str(folder / "plain"), "float32", (1, 2), 0, folder / "model")
    engine = start(str(folder / "model"), tp_sizes=(1, 2), max_total_tokens=2048)
    engine.responses, engine.named = responses, named
    yield engine
    engine.shutdown()


@SIZES
def test_a_response_ends_at_the_first_end_token_of_either_file(ends, tp):
    ends.switch(tp)
    outputs = ends.generate(input_ids=PROMPTS, sampling_params={"temperature": 0, "max_new_tokens": TOKENS})
    ended = set()
    for free, output in zip(ends.responses, outputs, strict=True):
        place = next((i for i, token in enumerate(free) if token in {0, 1, *ends.named}), TOKENS - 1)
        assert output["output_ids"] == free[: place + 1]
        if output["meta_info"]["finish_reason"]["type"] == "stop":
            assert output["meta_info"]["finish_reason"]["matched"] == free[place]
            ended.add(free[place])
    assert ended >= set(ends.named)
