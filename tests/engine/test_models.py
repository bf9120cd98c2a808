"""Families of models, odd vocabularies and bfloat16: exact across switches."""

import pytest

from tests.engine.conftest import Driver, Reference, ids, jobs, logprobs, start

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = (12, 160, 12, 160)
UP_DOWN_UP = [(14, 2, "migrate"), (40, 1, "migrate"), (70, 2, "migrate")]
UP_DOWN_DOWN_UP = [(14, 4, "migrate"), (40, 2, "migrate"), (70, 1, "migrate"), (100, 4, "migrate")]


def check(model_folder, kind, sizes=(1, 2), switches=UP_DOWN_UP, **shape):
    """Greedy tokens across switches are Hugging Face's, with the first weights and with others that come later."""
    folders = [model_folder(kind, **shape), model_folder(kind, seed=5, **shape)]
    engine = start(folders[0], tp_sizes=sizes, max_total_tokens=1024)
    try:
        driver, requests, seen = Driver(engine), jobs(LENGTHS, shared_prompt=True), []
        for folder in (*folders, folders[0]):  # each after a whole cycle with the ones before
            engine.loop.run_until_complete(engine.update_weights(folder))
            reference = Reference(folder)
            seen.append(ids(driver.run(requests, switches=switches)))
            assert seen[-1] == [reference.greedy(job.prompt, job.tokens) for job in requests]
        assert seen[0] != seen[1]
        assert len([r for r in engine.switches if r["kv_tokens_moved"]]) == 3 * len(switches)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
def test_family(model_folder, kind):
    check(model_folder, kind)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["llama", "llama-untied", "mistral", "qwen2", "qwen3", "qwen3-moe"])
def test_family_on_four_ranks(model_folder, kind):
    check(model_folder, kind, (1, 2, 4), UP_DOWN_DOWN_UP)


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "kv_heads"), [("qwen2", 1), ("qwen3-moe", 2)])
def test_fewer_kv_heads_than_ranks(model_folder, kind, kv_heads):
    check(model_folder, kind, (1, 2, 4), UP_DOWN_DOWN_UP, num_key_value_heads=kv_heads)


@pytest.mark.parametrize(
    ("vocabulary", "kind"),
    [
        (32001, "llama"),
        pytest.param(32001, "llama-untied", marks=pytest.mark.matrix),
        (49159, "llama-untied"),
        pytest.param(49159, "llama", marks=pytest.mark.matrix),
    ],
)
def test_a_vocabulary_that_no_size_divides(model_folder, vocabulary, kind):
    folder = model_folder(kind, vocab_size=vocabulary)
    engine = start(folder, tp_sizes=(1, 2, 4), max_total_tokens=512)
    try:
        reference, requests = Reference(folder), jobs((120, 130))
        switches = [(8, 2, "migrate"), (14, 4, "migrate"), (20, 1, "migrate")]
        outputs = Driver(engine).run(requests, switches=switches)
        assert ids(outputs) == [reference.greedy(job.prompt, job.tokens) for job in requests]
        # At this temperature every id is about as likely as any other, a padded one too if it could be drawn.
        sampled = Driver(engine).run(jobs((200,) * 4), temperature=100.0, switches=switches)
        assert all(0 <= token < vocabulary for tokens in ids(sampled) for token in tokens)
        assert max(max(tokens) for tokens in ids(sampled)) > vocabulary * 0.95
    finally:
        engine.shutdown()


def test_bfloat16_stays_within_its_noise(model_folder):
    folder = model_folder("qwen3", dtype="bfloat16")
    engine = start(folder, tp_sizes=(1, 2), max_total_tokens=1024, dtype="bfloat16")
    try:
        driver, requests = Driver(engine), jobs(LENGTHS)
        exact = Reference(folder)  # the same weights, computed in fp32

        def error(outputs):
            return max(
                abs(got - forced)
                for job, output in zip(requests, outputs, strict=True)
                for got, forced in zip(logprobs(output), exact.logprobs(job.prompt, output["output_ids"]), strict=True)
            )

        static = error(driver.run(requests, temperature=1.0))
        switched = error(driver.run(requests, temperature=1.0, switches=UP_DOWN_UP))
        assert 0 < static < 0.2  # what bfloat16 costs without any switch
        assert switched < 2 * static
    finally:
        engine.shutdown()
