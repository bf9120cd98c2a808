"""All ranks on one device: what they exchange goes through host memory, between the segments of a graph.

A CPU is one device, too: here the same hooks run on tensors that are in host memory already.
"""

from types import SimpleNamespace

import pytest
import torch

from pat.engine import one_device
from tests.engine.conftest import Driver, Reference, ids, jobs, start

SWITCHES = [(5, 2, "migrate"), (15, 1, "recompute"), (25, 2, "recompute"), (35, 1, "migrate")]


@pytest.mark.engine
def test_tokens_are_hugging_faces_at_every_size(model_folder):
    folder = model_folder("qwen3")
    engine = start(folder, tp_sizes=(1, 2), one_device=True)
    try:
        requests = jobs((40, 60, 60))
        outputs = Driver(engine).run(requests, switches=SWITCHES)
        assert engine.graph_memory() == {1: 0, 2: 0}  # a CPU has none
    finally:
        engine.shutdown()
    reference = Reference(folder)
    assert ids(outputs) == [reference.greedy(job.prompt, job.tokens) for job in requests]


class Mail:
    """Another rank with twice this one's numbers."""

    def all_reduce(self, original, group, tensor):
        return tensor.mul_(3)

    def all_gather(self, original, group, tensor, dim):
        return torch.cat([tensor, 2 * tensor], dim)


class Graph:
    """As much of a breakable graph: what runs at each replay."""

    def __init__(self):
        self.steps = []

    def breaks(self, function):
        def captured(*args):
            self.steps.append(lambda: function(*args))
            return function(*args)

        return captured


@pytest.fixture
def exchange():
    graph = Graph()
    group = SimpleNamespace(world_size=2, unique_name="tp:1")
    return one_device.HostCollectives(Mail(), graph.breaks), group, graph


def test_sums_and_gathers_are_in_place_where_the_graph_reads_them(exchange):
    host, group, graph = exchange
    tensor, total = torch.ones(2, 3), torch.ones(2, 3)
    assert host.all_reduce(None, group, total) is total
    assert torch.equal(total, 3 * tensor)
    assert torch.equal(host.all_gather(None, group, tensor, -1), torch.cat([tensor, 2 * tensor], -1))
    output = torch.zeros(4, 3)
    host.all_gather_into_tensor(None, group, output, tensor)
    assert torch.equal(output, torch.cat([tensor, 2 * tensor]))
    tensor += 4  # a replay: the segment before has written other numbers to the same place
    total.fill_(5)
    for step in graph.steps:
        step()
    assert torch.equal(total, torch.full((2, 3), 15.0))
    assert torch.equal(output, torch.cat([tensor, 2 * tensor]))


def test_a_group_of_one_exchanges_nothing(exchange):
    host, group, graph = exchange
    group.world_size = 1
    tensor = torch.ones(2)
    assert host.all_reduce(None, group, tensor) is tensor
    assert host.all_gather(lambda *_: "SGLang's", group, tensor) == "SGLang's"
    assert not graph.steps


def test_ranks_share_the_devices_memory_and_use_no_nccl():
    made = one_device.server_args(base=1, accelerator=True)
    assert made["max_total_tokens"]  # no rank takes for its KV what another has not taken yet
    assert made["cuda_graph_backend_decode"] is None  # no collective: whole graphs
    assert one_device.server_args(base=2, accelerator=True)["cuda_graph_backend_decode"] == "breakable"
    called = one_device.without_nccl(lambda *args, **kwargs: kwargs, [[0, 1]], 0, "gloo", group_name="tp")
    assert called == {"group_name": "tp", "use_pynccl": False, "use_custom_allreduce": False}
