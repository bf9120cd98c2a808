"""All-reduce and all-gather through shared memory, among real processes."""

import hashlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pat.engine.cpu.allreduce import SLOT_BYTES, Mailbox, SharedMemoryCollectives, supported

pytestmark = pytest.mark.skipif(not supported(), reason="mailboxes rely on the memory order of x86-64")

EXCHANGES, DEADLINE_S, WORLDS = 1000, 120.0, (2, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)


def tensor_of(rank: int, number: int) -> torch.Tensor:
    """What ``rank`` gives to exchange ``number``; every process can make everybody's."""
    shared, own = np.random.default_rng(number), np.random.default_rng([number, rank])
    shape = tuple(int(n) for n in shared.integers(1, 12, shared.integers(0, 4)))
    if number % 50 == 49:
        shape = ((0, 3), (300, 200))[number % 4 // 2]
    tensor = torch.from_numpy(own.normal(scale=100, size=shape)).to(DTYPES[number % len(DTYPES)])
    return tensor.transpose(0, -1) if number % 7 == 0 and tensor.dim() > 1 else tensor


def close(result: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether ``result`` is the sum ``exact`` (float64), up to the rounding of its own dtype."""
    if not result.is_floating_point():
        return torch.equal(result.double(), exact)
    epsilon = torch.finfo(result.dtype).eps
    return torch.allclose(result.double(), exact, rtol=4 * epsilon, atol=2000 * epsilon)


def not_gloo(*_args):
    raise AssertionError("a small tensor must not go through gloo")


def exchange_all(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    report = {}
    for world in WORLDS:
        if rank >= world:
            continue
        group = SimpleNamespace(
            unique_name=f"tp:{world}", ranks=list(range(world)), rank_in_group=rank, world_size=world
        )
        collectives, sums, gathers = SharedMemoryCollectives(Path(folder), DEADLINE_S), [], []
        digest = hashlib.sha256()
        for number in range(EXCHANGES):
            everybodys = [tensor_of(peer, number) for peer in range(world)]
            if number % 100 == rank:
                time.sleep(0.002)  # nobody is always the last
            if number % 5 == 4 and everybodys[0].dim():
                result = collectives.all_gather(not_gloo, group, everybodys[rank], 0)
                if not torch.equal(result, torch.cat(everybodys, 0)):
                    gathers.append(number)
            else:
                result = collectives.all_reduce(not_gloo, group, everybodys[rank].clone())
                if not close(result, sum(tensor.double() for tensor in everybodys)):
                    sums.append(number)
            digest.update(result.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        report[world] = {"sums": sums, "gathers": gathers, "digest": digest.hexdigest()}
    Path(folder, f"{rank}.json").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """{world: what each of its ranks found}: first ranks 0 and 1 together, then all three."""
    folder = tmp_path_factory.mktemp("mailbox")
    processes = torch.multiprocessing.spawn(exchange_all, (str(folder),), max(WORLDS), join=False)
    deadline = time.monotonic() + 2 * DEADLINE_S
    try:
        while not processes.join(timeout=1.0):
            assert time.monotonic() < deadline, "the exchanges did not end"
    finally:
        for process in processes.processes:
            process.kill()
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(max(WORLDS))]
    return {world: [found[rank][str(world)] for rank in range(world)] for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_is_the_sum(reports, world):
    assert [report["sums"] for report in reports[world]] == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_is_everybodys_tensor_in_rank_order(reports, world):
    assert [report["gathers"] for report in reports[world]] == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_get_the_same_bits(reports, world):
    assert len({report["digest"] for report in reports[world]}) == 1


@pytest.mark.parametrize("tensor", [torch.zeros(SLOT_BYTES // 4 + 1), torch.zeros(2, device="meta")])
def test_what_does_not_fit_goes_the_usual_way(tmp_path, tensor):
    group = SimpleNamespace(unique_name="tp:0", ranks=[0, 1], rank_in_group=0, world_size=2)
    collectives = SharedMemoryCollectives(tmp_path, 0.1)
    assert collectives.all_reduce(lambda group, tensor: "reduced", group, tensor) == "reduced"
    assert collectives.all_gather(lambda group, tensor, dim: f"gathered {dim}", group, tensor, 1) == "gathered 1"
    assert not list(tmp_path.iterdir())


def test_a_group_of_one_needs_no_mailbox(tmp_path):
    group = SimpleNamespace(unique_name="tp:0", ranks=[2], rank_in_group=0, world_size=1)
    collectives = SharedMemoryCollectives(tmp_path, 0.1)
    assert collectives.all_reduce(lambda group, tensor: "as it was", group, torch.zeros(2)) == "as it was"


def test_groups_of_one_name_have_a_mailbox_each(tmp_path):
    """At tp 2 of 4 ranks there are two groups; their first ranks tell them apart."""
    collectives = SharedMemoryCollectives(tmp_path, 0.1)
    for ranks in ([0, 1], [2, 3]):
        group = SimpleNamespace(unique_name="tp:0", ranks=ranks, rank_in_group=0, world_size=2)
        with pytest.raises(TimeoutError):  # the other rank is not there
            collectives.all_reduce(not_gloo, group, torch.zeros(1))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_silent_rank_is_named(tmp_path):
    box = Mailbox(tmp_path / "box", 0, 2, timeout_s=0.2)
    with pytest.raises(TimeoutError, match="tensor-parallel rank 1 did not answer"):
        box.exchange(torch.zeros(4))


def test_of_three_ranks_the_silent_one_is_named(tmp_path):
    waiting, answering = (Mailbox(tmp_path / "box", rank, 3, timeout_s=0.2) for rank in (0, 2))
    answering.peers = []  # waits for nobody
    answering.exchange(torch.ones(4))
    waiting.peers.reverse()  # looks at the one that has answered first
    with pytest.raises(TimeoutError, match="tensor-parallel rank 1 did not answer"):
        waiting.exchange(torch.zeros(4))


def test_a_mailbox_that_its_first_rank_never_makes_is_an_error(tmp_path):
    path = tmp_path / "box"
    with pytest.raises(TimeoutError, match=f"rank 1: {os.fspath(path)} was not created"):
        Mailbox(path, 1, 2, timeout_s=0.1)


def test_groups_that_are_made_at_the_same_time_do_not_meet_in_one_file(tmp_path):
    (tmp_path / "mailbox.tp_2.tmp").write_text("of another group")
    Mailbox(tmp_path / "mailbox.tp_2.0", rank=0, world=2, timeout_s=1.0)
    Mailbox(tmp_path / "mailbox.tp_2.1", rank=0, world=2, timeout_s=1.0)
    assert (tmp_path / "mailbox.tp_2.tmp").read_text() == "of another group"
    assert {file.name for file in tmp_path.iterdir()} == {"mailbox.tp_2.0", "mailbox.tp_2.1", "mailbox.tp_2.tmp"}
