"""New weights, released memory and pauses of a real engine, while narrow and while wide."""

import asyncio
import json
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from pat.engine.controller import Controller
from pat.policy import Threshold
from tests.engine.conftest import Driver, Reference, family, ids, jobs, logprobs, start, update_of

pytestmark = pytest.mark.engine

SIZES = pytest.mark.parametrize("tp", [1, 2])


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def driver(request, model_folder):
    folders = [model_folder(request.param, seed) for seed in (0, 7)]
    engine = start(folders[0], tp_sizes=(1, 2), max_total_tokens=1200)
    made = Driver(engine)
    made.folders, made.references = folders, [Reference(folder) for folder in folders]
    made.tensors = [list(load_file(f"{folder}/model.safetensors").items()) for folder in folders]
    yield made
    engine.shutdown()


def answers(driver, which, requests=None, **options):
    """Checks that the outputs are those of model ``which``; returns their log-probs."""
    requests = requests or jobs((12, 20, 12))
    outputs, reference = driver.run(requests, **options), driver.references[which]
    assert ids(outputs) == [reference.greedy(job.prompt, job.tokens) for job in requests]
    return [logprobs(output) for output in outputs]


def alone(driver, which):
    """The same one by one: alone in its batch a request's log-probs are the same bits every time."""
    return [answers(driver, which, [job]) for job in jobs((12, 8))]


@SIZES
@pytest.mark.parametrize("size", [1, 10, 10_000])
def test_buckets_of_tensors_give_the_same_model_whatever_their_size(driver, size, tp):
    engine, tensors = driver.engine, driver.tensors[1]
    assert engine.update_weights_from_disk(driver.folders[1])[0]
    by_disk = alone(driver, 1)
    assert engine.update_weights_from_disk(driver.folders[0])[0]
    assert alone(driver, 0) != by_disk
    for first in range(0, len(tensors), size):
        engine.switch(tp)
        bucket = tensors[first : first + size]
        done, message = engine.update_weights_from_tensor(bucket, flush_cache=first + size >= len(tensors))
        assert done, message
        assert engine.layout.tp == 1
    assert alone(driver, 1) == by_disk
    answers(driver, 1, switches=[(4, 2, "migrate"), (8, 1, "migrate"), (10, 2, "recompute")])
    assert engine.get_model_info()["model_path"] == driver.folders[0]  # and not a folder in shared memory
    assert engine.update_weights_from_disk(driver.folders[0])[0]


def test_tensors_may_share_memory_and_have_any_strides(driver):
    engine, tensors = driver.engine, dict(driver.tensors[1])
    odd = [(name, tensor.t().contiguous().t() if tensor.ndim == 2 else tensor) for name, tensor in tensors.items()]
    embedding = tensors["model.embed_tokens.weight"]
    if "lm_head.weight" not in tensors:  # tied, and given twice
        odd.append(("lm_head.weight", embedding))
    assert engine.update_weights_from_tensor(odd)[0]
    answers(driver, 1)
    assert engine.update_weights_from_tensor(driver.tensors[0])[0]
    answers(driver, 0)


def test_what_is_not_a_tensor_by_name_is_refused(driver):
    for wrong in ([("a", b"bytes")], [b"serialised"]):
        with pytest.raises(ValueError, match=r"\(name, tensor\) pairs"):
            driver.engine.update_weights_from_tensor(wrong)
    with pytest.raises(ValueError, match="flattened_bucket"):
        driver.engine.update_weights_from_tensor(driver.tensors[0], load_format="flattened_bucket")
    assert driver.engine.update_weights_from_tensor([]) == (True, "no tensors were given")


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
WRONG = {
    "misspelt": (lambda t: {"model.layers.1.mlp.upp_proj.weight": t[UP]}, r"no model.layers.1.mlp.upp_proj.weight"),
    "prefixed": (
        lambda t: {f"module.{name}": tensor for name, tensor in t.items()},
        r"no module\..*, did you mean model",
    ),
    "too short": (
        lambda t: t | {UP: t[UP][:-1]},
        r"up_proj.weight.* is of shape \[255, 128\] and must be of \[256, 128\]",
    ),
    "too flat": (lambda t: t | {NORM: t[NORM][0]}, r"norm.weight.* is of shape \[\] and must be of \[128\]"),
    "quantised": (lambda t: t | {UP: t[UP].char()}, r"up_proj.weight.* is of type (I8|int8) and must be of floating"),
    "not there": (
        lambda t: {name: tensor for name, tensor in t.items() if ".layers.2." not in name},
        r"(9|11) of \d+ tensors are missing: model\.layers\.2\.",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_weights_that_are_not_the_models_are_refused_by_name_and_the_old_ones_serve_on(driver, kind, tmp_path):
    """By each way in, before anything is written."""
    engine, (wrong, message) = driver.engine, WRONG[kind]
    tensors = wrong(dict(driver.tensors[1]))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    before = checksums(engine)
    engine.switch(2)
    refusals = [engine.update_weights_from_disk(str(tmp_path))]
    if kind != "not there":  # a bucket may hold any part of the model
        refusals.append(engine.update_weights_from_tensor(list(tensors.items())))
    for done, text, *_ in refusals:
        assert not done
        assert re.search(message, text) and text.endswith("Nothing was loaded."), text
        assert "\n" not in text
    with pytest.raises(RuntimeError, match=message):
        engine.loop.run_until_complete(engine.update_weights(str(tmp_path)))
    assert engine.layout.tp == 2
    answers(driver, 0)
    assert checksums(engine) == before


def test_a_tensor_given_twice_is_refused(driver):
    done, message = driver.engine.update_weights_from_tensor([*driver.tensors[1], driver.tensors[1][0]])
    assert (done, message) == (False, f"{driver.tensors[1][0][0]} is there twice. Nothing was loaded.")
    answers(driver, 0)


def test_requests_that_are_sent_while_weights_are_loaded_wait_for_the_new_ones(driver):
    engine, (job,) = driver.engine, jobs((12,))
    expected = [reference.greedy(job.prompt, job.tokens) for reference in driver.references]

    async def sent_meanwhile(which):
        request = update_of(driver.folders[which])
        update = asyncio.ensure_future(engine.tokenizer_manager.update_weights_from_disk(request))
        work = []
        while not update.done():
            if engine.tokenizer_manager.updating and len(work) < 20:
                work.append(asyncio.ensure_future(driver.request(job, 0.0)))
            await asyncio.sleep(0.001)
        assert update.result()[0]
        return await asyncio.gather(*work)

    for which in (1, 0):
        outputs = ids(engine.loop.run_until_complete(asyncio.wait_for(sent_meanwhile(which), 60)))
        assert outputs
        assert outputs == [expected[which]] * len(outputs)


def test_ways_around_the_check_are_closed(driver):
    manager = driver.engine.tokenizer_manager
    for name in ("update_weights_from_tensor", "update_weights_from_distributed", "update_weights_from_ipc"):
        with pytest.raises(NotImplementedError, match=rf"tokenizer_manager\.{name} is not supported"):
            getattr(manager, name)(None)
    with pytest.raises(ValueError, match="action 'reset_tensors' is not supported"):
        driver.engine.loop.run_until_complete(manager.check_weights(check("reset_tensors")))


def check(action):
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    return CheckWeightsReqInput(action=action)


def checksums(engine):
    """Of each rank's parameters, at the base."""
    manager = engine.tokenizer_manager
    done, message, ranks, _ = engine.loop.run_until_complete(manager.check_weights(check("checksum")))
    assert done, message
    assert engine.layout.tp == engine.settings.base
    return [rank["checksums"] for rank in ranks]


def test_weights_are_the_same_bits_after_every_switch(driver):
    engine, before = driver.engine, checksums(driver.engine)
    assert before[0] == before[1]
    for tp in (2, 1, 2, 1):
        engine.switch(tp)
    assert checksums(engine) == before
    engine.switch(2)
    assert engine.update_weights_from_disk(driver.folders[1])[0]
    changed = checksums(engine)
    assert changed[0] == changed[1] != before[0]
    assert engine.update_weights_from_disk(driver.folders[0])[0]
    assert checksums(engine) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_while_weights_are_written_stops_generation_until_all_are_loaded(driver, rank):
    engine, tensors = driver.engine, driver.tensors[1]
    engine.switch(2)
    fail(engine, rank, UP)
    done, message, *_ = engine.update_weights_from_disk(driver.folders[1])
    assert not done
    failed = f"rank {rank}: Failed to update weights: a fault on demand"
    assert message == f"{failed}. The weights are undefined until all of them are loaded."
    undefined = rf"(29|36) of the model's (29|36) tensors .* are undefined until they are loaded: .*{failed}"

    def refused(match):
        with pytest.raises(RuntimeError, match=match):
            engine.generate(input_ids=[5, 6, 7])
        with pytest.raises(RuntimeError, match=match):
            engine.loop.run_until_complete(engine.tokenizer_manager.continue_generation(None))

    refused(undefined)
    assert engine.switch(2)["tp_to"] == 2  # the engine lives
    assert not engine.update_weights_from_tensor([("a", tensors[0][1])])[0]
    refused(undefined)
    assert engine.update_weights_from_tensor(tensors[:-1])[0]
    refused(rf"1 of the model's \d+ tensors \({tensors[-1][0]}, \.\.\.\)")
    assert engine.update_weights_from_tensor(tensors[-1:])[0]
    answers(driver, 1, switches=[(4, 2, "migrate")])
    fail(engine, rank, NORM)  # of a bucket: only what it holds is undefined
    assert not engine.update_weights_from_tensor([(NORM, dict(driver.tensors[0])[NORM])])[0]
    refused(rf"1 of the model's \d+ tensors \({NORM}, \.\.\.\)")
    assert engine.update_weights_from_disk(driver.folders[0])[0]
    answers(driver, 0)


def fail(engine, rank, name):
    fault = {"rank": rank, "phase": f"load {name}", "kind": "exception"}
    engine.settings.path.joinpath("fault").write_text(json.dumps(fault))


def test_a_failure_of_a_rank_that_answers_nobody_is_told_too(model_folder):
    """At a base of two ranks only the first of a replica answers."""
    folders = [model_folder("qwen3", seed) for seed in (0, 7)]
    engine = start(folders[0], tp_sizes=(2,), max_total_tokens=512)
    try:
        (job,) = jobs((12,))
        fail(engine, 1, UP)
        done, message, *_ = engine.update_weights_from_disk(folders[1])
        assert not done
        assert message.startswith("rank 1: Failed to update weights: a fault on demand")
        assert engine.update_weights_from_disk(folders[1])[0]
        assert ids(Driver(engine).run([job])) == [Reference(folders[1]).greedy(job.prompt, job.tokens)]
    finally:
        engine.shutdown()


@pytest.mark.parametrize("way", ["disk", "tensors"])
def test_an_update_that_nobody_waits_for_ends_nevertheless(driver, way):
    engine, (job,) = driver.engine, jobs((12,))
    engine.switch(2)

    async def given_up():
        fault = {"rank": 1, "phase": f"load {UP}", "kind": "delay", "seconds": 1}
        engine.settings.path.joinpath("fault").write_text(json.dumps(fault))
        if way == "disk":
            way_in = engine.tokenizer_manager.update_weights_from_disk(update_of(driver.folders[1]))
        else:
            way_in = engine.async_update_weights_from_tensor(driver.tensors[1])
        update = asyncio.ensure_future(way_in)
        while not engine.tokenizer_manager.updating:
            await asyncio.sleep(0.001)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert engine.tokenizer_manager.updating
        outputs = [asyncio.ensure_future(driver.request(job, 0.0)) for _ in range(2)]
        await engine.async_switch(2)
        return await asyncio.gather(*outputs)

    # What comes meanwhile waits for the new weights.
    outputs = engine.loop.run_until_complete(asyncio.wait_for(given_up(), 60))
    assert ids(outputs) == [driver.references[1].greedy(job.prompt, job.tokens)] * 2
    assert engine.update_weights_from_disk(driver.folders[0])[0]
    answers(driver, 0)


def test_an_update_that_has_not_begun_can_be_called_off(driver):
    engine, requests = driver.engine, jobs((60, 40))

    async def called_off():
        work = [asyncio.ensure_future(driver.request(job, 0.0)) for job in requests]
        while engine.in_flight < 2:
            await asyncio.sleep(0.001)
        way_in = engine.tokenizer_manager.update_weights_from_disk(update_of(driver.folders[1]))
        update = asyncio.ensure_future(way_in)
        await asyncio.sleep(0.001)  # it waits for them
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        return await asyncio.gather(*work)

    outputs = engine.loop.run_until_complete(asyncio.wait_for(called_off(), 60))
    assert ids(outputs) == [driver.references[0].greedy(job.prompt, job.tokens) for job in requests]
    answers(driver, 0)


def test_an_engine_does_not_start_without_a_layer(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if ".layers.2." not in name}, folder / "model.safetensors")
    before = set(family())
    with pytest.raises(ValueError, match=rf"^{folder}: 9 of 29 tensors are missing: model\.layers\.2\."):
        start(str(folder))
    assert set(family()) == before


def test_an_update_session_of_sglang(driver):
    engine = driver.engine
    engine.switch(2)
    assert engine.begin_weight_update()[0]
    assert engine.update_weights_from_tensor(driver.tensors[1])[0]
    assert engine.end_weight_update()[0]
    answers(driver, 1)
    assert engine.update_weights_from_disk(driver.folders[0])[0]


@SIZES
def test_an_update_waits_for_what_is_unfinished_and_no_policy_switches_meanwhile(driver, tp):
    engine, (early, late) = driver.engine, (jobs((60, 40)), jobs((30, 30)))
    engine.controller = Controller(engine, Threshold(2, 8))  # would be wide all the time

    async def run():
        before = [asyncio.ensure_future(driver.request(job, 0.0)) for job in early]
        await driver.progress(6, 2)
        await engine.async_switch(tp)
        update = asyncio.ensure_future(engine.async_update_weights_from_tensor(driver.tensors[1]))
        await asyncio.sleep(0.05)
        after = [asyncio.ensure_future(driver.request(job, 0.0)) for job in late]
        done = await asyncio.wait_for(update, 60)
        assert all(work.done() for work in before)
        return done, await asyncio.gather(*before), await asyncio.wait_for(asyncio.gather(*after), 60)

    try:
        done, first, second = engine.loop.run_until_complete(run())
        engine.loop.run_until_complete(engine.end_iteration())
    finally:
        engine.controller = None
    assert done[0]
    old, new = driver.references
    assert ids(first) == [old.greedy(job.prompt, job.tokens) for job in early]
    assert ids(second) == [new.greedy(job.prompt, job.tokens) for job in late]
    assert engine.update_weights_from_disk(driver.folders[0])[0]


def test_weights_between_generations(driver):
    engine = driver.engine
    engine.switch(2)
    engine.loop.run_until_complete(engine.update_weights(driver.folders[1]))
    answers(driver, 1)
    with pytest.raises(
        RuntimeError, match=r"^no new weights: /nowhere: no checkpoint folder, .* Nothing was loaded\.$"
    ):
        engine.loop.run_until_complete(engine.update_weights("/nowhere"))
    assert engine.update_weights_from_disk(driver.folders[0])[0]
    (job,) = jobs((900,))

    async def busy():
        work = asyncio.ensure_future(driver.request(job, 0.0, rid="busy"))
        await driver.progress(2, 1)
        with pytest.raises(RuntimeError, match="under 1 unfinished requests"):
            await engine.update_weights(driver.folders[1])
        engine.tokenizer_manager.abort_request(rid="busy")
        await work

    engine.loop.run_until_complete(busy())
    answers(driver, 0)


def test_weights_are_read_at_the_base(driver):
    engine, name = driver.engine, "model.layers.0.mlp.down_proj.weight"
    engine.switch(2)
    with pytest.raises(RuntimeError, match=r"call switch\(1\)"):
        engine.get_weights_by_name(name)
    engine.switch(1)
    expected = dict(driver.tensors[0])[name][:4].tolist()
    for rank in engine.get_weights_by_name(name, truncate_size=4):
        assert rank is None or rank == expected  # SGLang reads those of some models only


# --- memory ------------------------------------------------------------------------------------------------
def test_memory_is_released_at_the_base_when_nothing_is_unfinished(driver):
    engine, (early, late) = driver.engine, (jobs((40, 30)), jobs((10,)))

    async def run():
        work = [asyncio.ensure_future(driver.request(job, 0.0)) for job in early]
        await driver.progress(6, 2)
        await engine.async_switch(2)
        await asyncio.wait_for(engine.release_memory(["kv_cache"]), 60)
        assert all(one.done() for one in work)
        return await asyncio.gather(*work)

    assert ids(engine.loop.run_until_complete(run())) == [
        driver.references[0].greedy(job.prompt, job.tokens) for job in early
    ]
    assert engine.layout.tp == 1
    engine.release_memory_occupation()  # the rest
    engine.release_memory_occupation(["weights"])  # again: nothing
    with pytest.raises(RuntimeError, match="cuda_graph, kv_cache, weights of the engine are released"):
        engine.switch(2)
    with pytest.raises(RuntimeError, match="resume them first"):
        engine.generate(input_ids=[5, 6, 7])
    engine.resume_memory_occupation(["weights"])
    assert engine.update_weights_from_tensor(driver.tensors[1])[0]  # as a trainer does
    with pytest.raises(RuntimeError, match="cuda_graph, kv_cache of"):
        engine.switch(2)
    engine.loop.run_until_complete(engine.resume_memory())
    engine.resume_memory_occupation()
    answers(driver, 1, late, switches=[(4, 2, "migrate")])
    assert engine.update_weights_from_disk(driver.folders[0])[0]


# --- pauses ------------------------------------------------------------------------------------------------
@SIZES
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_generation_goes_on_after_a_pause(driver, mode, tp):
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    engine, requests = driver.engine, jobs((60, 40))

    async def pause():
        await engine.async_switch(tp)
        await engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode))
        assert engine.paused
        await asyncio.sleep(0.1)
        steps = engine.step_marks()
        await asyncio.sleep(0.2)
        assert engine.step_marks() == steps
        assert engine.in_flight == 2
        await engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput())

    outputs = driver.run(requests, switches=[(6, tp, "migrate")], during=pause)
    assert ids(outputs) == [driver.references[0].greedy(job.prompt, job.tokens) for job in requests]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_weights_change_under_a_pause_while_wide(driver, mode):
    """A partial rollout: what comes after the pause is of the new weights, in the base layout, still paused."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    engine, requests = driver.engine, jobs((60, 40))

    async def pause():
        await engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode))
        done = await asyncio.wait_for(engine.async_update_weights_from_tensor(driver.tensors[1], flush_cache=False), 60)
        assert done[0], done
        assert engine.layout.tp == 1
        steps = engine.step_marks()
        await asyncio.sleep(0.2)
        assert engine.step_marks() == steps
        await engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput())

    outputs = driver.run(requests, switches=[(6, 2, "migrate")], during=pause)
    assert [len(output["output_ids"]) for output in outputs] == [60, 40]
    assert engine.update_weights_from_disk(driver.folders[0])[0]
    answers(driver, 0)
