"""Devices: which, in what order, under what names; and what SGLang is told about them."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pat.engine.cpu import environment
from pat.engine.device import Cpu, device_of, named_once, visible_devices
from pat.layout import Layout


def test_the_device_is_chosen_by_sglangs_name_of_it():
    assert type(device_of("cpu")) is Cpu
    assert device_of("cpu:0").name == "cpu"


def connect(rank: int, folder: str) -> None:
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=limit)
    Cpu().connect(dist.group.WORLD)
    Cpu().connect(dist.new_group([rank], use_local_synchronization=True))  # alone: nothing to connect
    Path(folder, f"connected {rank}").touch()
    dist.destroy_process_group()


def test_a_group_is_connected_by_all_of_its_ranks(tmp_path):
    torch.multiprocessing.spawn(connect, (str(tmp_path),), 2)
    assert len(list(tmp_path.glob("connected *"))) == 2


@pytest.mark.parametrize(
    ("base", "sizes", "devices"),
    [(1, (1, 2, 4), "4,6,5,7"), (2, (2, 4), "4,5,6,7"), (1, (1, 4), "4,5,6,7"), (4, (4,), "4,5,6,7")],
)
def test_replicas_of_every_size_are_on_devices_in_a_row(monkeypatch, base, sizes, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    layout = Layout(4, base)
    assert visible_devices(layout, sizes) == {"CUDA_VISIBLE_DEVICES": devices}
    # SGLang starts replica after replica, each rank of it on the next visible device.
    ranks = [layout.rank(replica, tp_rank) for replica in range(layout.dp) for tp_rank in range(base)]
    where = dict(zip(ranks, devices.split(","), strict=True))
    for tp in sizes:
        for replica in Layout(4, tp).replicas:
            assert "".join(sorted(where[rank] for rank in replica)) in "4567"


def test_fewer_devices_than_ranks_are_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ValueError, match="2 ranks need as many GPUs; visible are 1"):
        visible_devices(Layout(2, 1), (1, 2))


@pytest.fixture
def three_gpus(tmp_path, monkeypatch):
    """A fake nvidia-smi."""
    lines = "0, GPU-aa11\\n1, GPU-bb22\\n2, GPU-bb33\\n"
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return monkeypatch


def test_uuids_become_indices_in_the_drivers_order(three_gpus):
    three_gpus.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb3,GPU-aa11")  # a unique beginning will do
    assert visible_devices(Layout(2, 1), (1, 2)) == {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(("wrong", "count"), [("GPU-bb", 2), ("GPU-cc", 0)])
def test_a_uuid_that_is_no_one_gpus_is_an_error_by_name(three_gpus, wrong, count):
    three_gpus.setenv("CUDA_VISIBLE_DEVICES", f"{wrong},GPU-aa11")
    with pytest.raises(ValueError, match=f"{wrong}, which is {count} of the GPUs .*GPU-bb33.*indices"):
        visible_devices(Layout(2, 1), (1, 2))


def test_parts_of_gpus_keep_their_uuids(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert visible_devices(Layout(2, 1), (1, 2)) == {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}


def test_the_devices_of_a_replicas_workers_are_named_once():
    assert named_once(["10", "9", "10", ""]) == ["9", "10"]
    assert named_once(["GPU-b,GPU-a", "GPU-a", "MIG-7"]) == ["GPU-b", "GPU-a", "MIG-7"]


def test_on_nvidias_gpus_attention_is_what_verl_sets_and_mig_has_no_custom_all_reduce(monkeypatch):
    monkeypatch.setattr(environment, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    given = environment.server_args()
    assert given["attention_backend"] == "flashinfer"
    assert "disable_custom_all_reduce" not in given
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert environment.server_args()["disable_custom_all_reduce"] is True
    monkeypatch.setattr(torch.version, "cuda", None)  # AMD's
    assert "attention_backend" not in environment.server_args()
