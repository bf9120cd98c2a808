"""The engine on GPUs: graphs of every size, and no token that depends on a switch.

Not part of `make test`. On a machine with a GPU: pytest -m gpu tests/engine/test_gpu.py. On one, all ranks share it:
gloo between them, and graphs above tp 1 in segments (pat/engine/one_device.py). On two or more the same tests run over
NCCL with whole graphs as well, and what is about speed only there.
"""

import polars as pl
import pytest

from pat.engine.cpu import environment
from pat.engine.device import Accelerator
from tests.engine.conftest import Driver, Reference, ids, jobs, logprobs, start

SWITCHES = [(8, 2, "migrate"), (16, 1, "migrate"), (24, 2, "recompute"), (32, 1, "recompute"), (40, 2, "migrate")]
# Head sizes that GPU kernels take, unlike those of the models for CPUs.
SHAPE = {"hidden_size": 512, "head_dim": 64}
LIMITS = {"max_total_tokens": 8192, "max_running_requests": 16, "cuda_graph_max_bs_decode": 16}


def gpus() -> int:
    if not environment.has_accelerator():
        return 0
    import torch

    return torch.cuda.device_count()


pytestmark = [pytest.mark.gpu, pytest.mark.engine]
one_gpu = pytest.mark.skipif(gpus() < 1, reason="needs a GPU")
two_gpus = pytest.mark.skipif(gpus() < 2, reason="needs two GPUs")
ONE = pytest.param(True, marks=one_gpu, id="one device")
TWO = pytest.param(False, marks=two_gpus, id="two devices")


def engine(model_folder, dtype, **options):
    folder = model_folder("qwen3", dtype=dtype, **SHAPE)
    driver = Driver(start(folder, tp_sizes=(1, 2), dtype=dtype, **LIMITS | options))
    driver.reference = Reference(folder)
    return driver


@pytest.fixture(scope="module", params=[ONE, TWO])
def exact(request, model_folder):
    """fp32 with graphs; of the attention kernels with graphs, Triton's take it."""
    driver = engine(model_folder, "float32", attention_backend="triton", one_device=request.param)
    yield driver
    driver.engine.shutdown()


def decode_steps(driver) -> dict[int, float]:
    """{tp: median seconds of a decode step} of one run with switches."""
    marks = driver.engine.step_marks()
    driver.run(jobs((60, 60)), switches=[(8, 2, "migrate"), (30, 1, "migrate")])
    steps = driver.engine.steps(marks).filter(pl.col("decode"))
    return dict(steps.group_by("tp").agg(pl.col("seconds").median()).iter_rows())


def test_tokens_do_not_depend_on_switches(exact):
    requests = jobs((12, 12, 60, 12, 60, 60), shared_prompt=True)
    outputs = exact.run(requests, switches=SWITCHES)
    assert ids(outputs) == [exact.reference.greedy(job.prompt, job.tokens) for job in requests]
    static, switched = (exact.run(requests, temperature=1.0, switches=switches) for switches in ((), SWITCHES))
    assert ids(static) == ids(switched)


@pytest.mark.parametrize("one_device", [ONE, TWO])
@pytest.mark.parametrize("attention", ["flashinfer", "triton", None])  # PAT's default, one for all, SGLang's own choice
def test_log_probabilities_in_bf16_are_those_of_teacher_forcing(model_folder, attention, one_device):
    driver = engine(model_folder, "bfloat16", attention_backend=attention, one_device=one_device)
    try:
        requests = jobs((60, 60, 60))
        outputs = driver.run(requests, temperature=1.0, switches=SWITCHES)
    finally:
        driver.engine.shutdown()
    for job, output in zip(requests, outputs, strict=True):
        forced = driver.reference.logprobs(job.prompt, output["output_ids"])
        errors = [abs(a - b) for a, b in zip(logprobs(output), forced, strict=True)]
        assert sum(errors) / len(errors) < 0.05
        assert max(errors) < 0.5


@two_gpus
def test_both_sizes_decode_faster_with_graphs_than_without(model_folder):
    driver = engine(model_folder, "float32", attention_backend="triton")
    try:
        with_graphs = decode_steps(driver)
    finally:
        driver.engine.shutdown()
    driver = engine(model_folder, "float32", attention_backend="triton", disable_cuda_graph=True)
    try:
        without = decode_steps(driver)
    finally:
        driver.engine.shutdown()
    assert with_graphs.keys() == without.keys() == {1, 2}
    assert all(with_graphs[tp] < without[tp] for tp in with_graphs)


def test_switching_takes_no_memory_that_it_does_not_give_back(exact):
    import torch

    def used():
        return [total - free for free, total in map(torch.cuda.mem_get_info, range(gpus()))]

    cycle = [(4 * k, 2 if k % 2 else 1, "migrate") for k in range(1, 18)]
    exact.run(jobs((80, 80)), switches=cycle)
    before = used()
    exact.run(jobs((80, 80)), switches=cycle)
    assert all(now - then < 32 << 20 for now, then in zip(used(), before, strict=True))


def test_every_size_has_graphs(exact):
    taken = exact.engine.graph_memory()
    assert taken.keys() == {1, 2}
    assert all(taken.values())


@pytest.mark.parametrize("one_device", [ONE, TWO])
def test_memory_is_given_back_and_the_next_weights_are_the_answers(model_folder, one_device):
    """As verl does it on GPUs: training and generation share the memory; views and graphs outlive that."""
    folder = model_folder("qwen3", dtype="float32", **SHAPE)
    other = model_folder("qwen3", seed=1, dtype="float32", **SHAPE)
    driver = engine(
        model_folder, "float32", attention_backend="triton", enable_memory_saver=True, one_device=one_device
    )
    loop = driver.engine.loop
    try:
        driver.run(jobs((30, 30)), switches=SWITCHES[:1])
        for weights in (other, folder):
            loop.run_until_complete(driver.engine.release_memory())
            loop.run_until_complete(driver.engine.resume_memory())
            loop.run_until_complete(driver.engine.update_weights(weights))
            requests = jobs((40, 40))
            outputs = driver.run(requests, switches=SWITCHES[:3])
            reference = Reference(weights)
            assert ids(outputs) == [reference.greedy(job.prompt, job.tokens) for job in requests]
    finally:
        driver.engine.shutdown()


def test_weights_on_a_gpu_are_taken_as_tensors(exact, model_folder):
    import torch
    from safetensors.torch import load_file

    folder = model_folder("qwen3", dtype="float32", **SHAPE)
    other = model_folder("qwen3", seed=1, dtype="float32", **SHAPE)
    for weights in (other, folder):
        tensors = {name: tensor.cuda() for name, tensor in load_file(f"{weights}/model.safetensors").items()}
        exact.engine.update_weights_from_tensor(list(tensors.items()))
        del tensors
        torch.cuda.empty_cache()
        requests = jobs((20, 20))
        outputs = exact.run(requests, switches=SWITCHES[:1])
        reference = Reference(weights)
        assert ids(outputs) == [reference.greedy(job.prompt, job.tokens) for job in requests]


@one_gpu
def test_memory_in_use_is_what_the_device_says():
    import torch

    device = Accelerator("cuda")
    before = device.used_bytes()
    taken = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    assert device.used_bytes() - before >= taken.nbytes
    del taken
    assert device.used_bytes() - before < 32 << 20
    assert 0 < before < device.total_bytes


def connect(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    Accelerator("cuda").connect(dist.group.WORLD)
    dist.destroy_process_group()


@two_gpus
def test_two_gpus_are_connected(tmp_path):
    import torch

    torch.multiprocessing.spawn(connect, (str(tmp_path),), 2)
