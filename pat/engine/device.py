"""What differs between an accelerator and a CPU for what is made once at start: memory, graphs, first collectives."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from pat.layout import Layout, neighbours


def visible_devices(layout: Layout, tp_sizes: Sequence[int], one_device: bool = False) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for an engine of base ``layout``, so that each replica is on devices in a row.

    SGLang gives its processes the visible devices in the order of replicas; the ranks of a wide replica would be
    far from each other there, which matters where not all devices are linked alike. UUIDs of GPUs become indices,
    which SGLang wants. one_device: the first one is all ranks'. Raises ValueError with fewer devices than ranks, and
    for a UUID that is no GPU's here.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    order_of_indices = {}
    if any(device.startswith("GPU-") for device in devices):
        devices = _indices(devices)
        order_of_indices = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # else CUDA may count in another way than the driver
    if one_device:
        return {"CUDA_VISIBLE_DEVICES": devices[0]} | order_of_indices
    if len(devices) < layout.ranks:
        raise ValueError(f"{layout.ranks} ranks need as many GPUs; visible are {len(devices)} ({','.join(devices)})")
    order = neighbours(layout.ranks, tp_sizes)
    processes = [layout.rank(replica, tp_rank) for replica in range(layout.dp) for tp_rank in range(layout.tp)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[order.index(rank)] for rank in processes)} | order_of_indices


def named_once(lists: Iterable[str]) -> list[str]:
    """The devices of several CUDA_VISIBLE_DEVICES, each once: indices in ascending order, else as they come."""
    devices = list(dict.fromkeys(device.strip() for each in lists for device in each.split(",") if device.strip()))
    return sorted(devices, key=int) if all(device.isdigit() for device in devices) else devices


def _indices(devices: list[str]) -> list[str]:
    """Indices of GPUs named by the beginning of their UUIDs; other names as they are."""
    listed = {}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, timeout=60, encoding="utf-8").stdout.splitlines()
        listed = {uuid: index for index, uuid in (line.split(", ") for line in lines)}
    found = []
    for device in devices:
        matches = [index for uuid, index in listed.items() if uuid.startswith(device)]
        if device.startswith("GPU-") and len(matches) != 1:
            raise ValueError(
                f"CUDA_VISIBLE_DEVICES names {device}, which is {len(matches)} of the GPUs that nvidia-smi lists "
                f"({', '.join(listed) or 'none'}): give their indices"
            )
        found += matches if device.startswith("GPU-") else [device]
    return found


class Cpu:
    """A CPU: memory is not counted, and SGLang captures no graphs."""

    captures_graphs = False
    total_bytes = 0
    connect_bytes = 64  # gloo's ranks are connected when the group is made: enough to show that the group answers

    def __init__(self, name: str = "cpu") -> None:
        self.name = name

    def synchronize(self) -> None:
        """Wait for all work of this process on the device."""

    def used_bytes(self) -> int:
        """Bytes in use on the device, of this process and all others."""
        return 0

    def connect(self, group: dist.ProcessGroup) -> None:
        """Use ``group`` once in each way that a step or a switch does; called on all of its ranks.

        NCCL connects a group's ranks at first use, anew for another algorithm, which it chooses by the size of the
        message: seconds that a switch would spend, and memory that would be missing then.
        """
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return
        sent = torch.zeros(ranks * self.connect_bytes // 4, dtype=torch.float32, device=self.name)
        received = torch.empty_like(sent)
        dist.all_reduce(sent[:1], group=group)
        dist.all_reduce(sent, group=group)
        dist.all_gather(list(received.chunk(ranks)), sent.chunk(ranks)[0], group=group)
        dist.all_to_all_single(received, sent, group=group)
        self.synchronize()


class Accelerator(Cpu):
    """What torch calls ``name`` ("cuda"): device-wide memory figures, since graphs also take the driver's memory."""

    captures_graphs = True
    connect_bytes = 4 << 20  # to each peer, as SGLang's own warm-up of such an exchange sends

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.module = torch.get_device_module(name)
        self.total_bytes = self.module.mem_get_info()[1]

    def synchronize(self) -> None:
        self.module.synchronize()

    def used_bytes(self) -> int:
        self.synchronize()
        gc.collect()
        self.module.empty_cache()
        free, total = self.module.mem_get_info()
        return total - free


def device_of(name: str) -> Cpu:
    """The device that SGLang calls ``name``: "cpu", or an accelerator's name with or without its index."""
    kind = name.partition(":")[0]
    return Cpu(kind) if kind == "cpu" else Accelerator(kind)
