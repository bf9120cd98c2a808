"""Four ranks: every size to every other inside one generation."""

import pytest

from tests.engine.conftest import Driver, Reference, jobs, start

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_four_ranks_take_every_size(model_folder):
    folder = model_folder("qwen3")
    engine = start(folder, tp_sizes=(1, 2, 4), max_total_tokens=2048)
    try:
        requests = jobs((10, 120, 10, 120, 120, 10), shared_prompt=True)
        steps = [(12, 2), (24, 4), (36, 1), (48, 4), (60, 2), (72, 1)]
        outputs = Driver(engine).run(requests, switches=[(tokens, tp, "migrate") for tokens, tp in steps])
        reference = Reference(folder)
        assert [o["output_ids"] for o in outputs] == [reference.greedy(j.prompt, j.tokens) for j in requests]
        taken = [(r["tp_from"], r["tp_to"]) for r in engine.switches if r["unfinished"]]
        assert taken == [(1, 2), (2, 4), (4, 1), (1, 4), (4, 2), (2, 1)]
    finally:
        engine.shutdown()
