"""More ranks, other bases, and KV heads fewer than ranks: every size to every other inside one generation."""

import itertools

import pytest

from tests.engine.conftest import Driver, Reference, ids, jobs, start

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# tp in the order in which one generation takes them: each size to each other.
EVERY_PAIR = {
    (1, 2): (2, 1, 2),
    (1, 2, 4): (2, 4, 1, 4, 2, 1),
    (2, 4): (4, 2, 4),
    (1, 2, 4, 8): (2, 1, 4, 2, 8, 1, 8, 4, 8, 2, 4, 1),
}


def visit_every_pair(folder, sizes, kv, shared_prompt=True):
    """Run one generation that takes every pair of sizes; asserts that its tokens are Hugging Face's."""
    engine = start(folder, tp_sizes=sizes, max_total_tokens=2048)
    try:
        order = EVERY_PAIR[sizes]
        long = 12 * (len(order) + 2)
        requests = jobs((10, long, 10, long, long, 30), shared_prompt=shared_prompt)
        outputs = Driver(engine).run(requests, switches=[(12 * (i + 1), tp, kv) for i, tp in enumerate(order)])
        reference = Reference(folder)
        assert ids(outputs) == [reference.greedy(job.prompt, job.tokens) for job in requests]
        taken = [(r["tp_from"], r["tp_to"]) for r in engine.switches if r["unfinished"]]
        assert taken == list(itertools.pairwise((sizes[0], *order)))
        for record in engine.switches:
            assert record["kv"] == kv or not record["unfinished"]
            if record["unfinished"]:
                assert bool(record["kv_tokens_moved"]) == (kv == "migrate")
                assert bool(record["kv_tokens_recomputed"]) == (kv == "recompute")
    finally:
        engine.shutdown()


def test_four_ranks_with_two_kv_heads_take_every_size(model_folder):
    visit_every_pair(model_folder("qwen3", num_key_value_heads=2), (1, 2, 4), "migrate")


def test_a_base_of_two_widens_to_four(model_folder):
    visit_every_pair(model_folder("llama"), (2, 4), "migrate")


@pytest.mark.matrix
@pytest.mark.parametrize("kv", ["migrate", "recompute"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("sizes", [(1, 2), (1, 2, 4), (2, 4)], ids=lambda sizes: "tp" + "-".join(map(str, sizes)))
def test_every_pair_of_sizes(model_folder, sizes, kv_heads, kv):
    visit_every_pair(model_folder("qwen3", num_key_value_heads=kv_heads), sizes, kv)


@pytest.mark.matrix
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_eight_ranks_take_every_size(model_folder, kv_heads):
    visit_every_pair(model_folder("llama", num_key_value_heads=kv_heads), (1, 2, 4, 8), "migrate")
