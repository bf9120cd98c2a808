"""All ranks on one accelerator, so that whatever needs a GPU can be tested on a machine with one. Slow.

NCCL refuses two ranks on one device: groups are gloo's, and what SGLang's layers exchange goes through host memory.
A graph cannot hold that, so above tp 1 decode graphs are SGLang's "breakable" ones (prefill's are by default): captured
in segments, between which attention and collectives run as ever. Not covered so: NCCL, custom all-reduce, and whole
graphs above tp 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from pat.engine import sglang_api as sg
from pat.engine.cpu.allreduce import SharedMemoryCollectives

BREAKABLE = "breakable"
SHARE = 0.8  # of the device's memory, for the weights and KV of all ranks together: each counts what all have taken
MAX_TOTAL_TOKENS = 16384  # of a rank: else the first would take for its KV what the others have not taken yet
# SGLang would look for the NUMA node of a device that is not there.
VARIABLES = {"SGLANG_AUTO_NUMA_BIND": "0"}


def server_args(base: int, accelerator: bool) -> dict:
    """Arguments of sglang.Engine for ranks on one device that start at tp ``base``; a caller's own win."""
    if not accelerator:
        return {}
    return {
        "disable_custom_all_reduce": True,
        "cuda_graph_backend_decode": BREAKABLE if base > 1 else None,
        "mem_fraction_static": SHARE,
        "max_total_tokens": MAX_TOTAL_TOKENS,
    }


def run_scheduler(server_args, port_args, gpu_id: int, *args):
    """In place of SGLang's ``run_scheduler_process``, which counts the devices through."""
    return sg.run_scheduler_process(server_args, port_args, 0, *args)


def without_nccl(original, *args, **kwargs):
    """Hook around SGLang's ``init_model_parallel_group``."""
    return original(*args, **kwargs | {"use_pynccl": False, "use_custom_allreduce": False})


class HostCollectives:
    """Hooks for GroupCoordinator.all_reduce / all_gather / all_gather_into_tensor of tensors on a device.

    mail: does the same for tensors in host memory; None: gloo does. breaks: makes a function run between the segments
    of a graph that is being captured, at capture and at each replay (SGLang's ``eager_on_graph``).
    """

    def __init__(self, mail: SharedMemoryCollectives | None, breaks: Callable[[Callable], Callable]) -> None:
        self.mail, self.groups = mail, {}
        self._sum, self._gather = breaks(self._sum_now), breaks(self._gather_now)

    def all_reduce(self, original, group, tensor: torch.Tensor) -> torch.Tensor:
        if group.world_size > 1:
            self._sum(tensor, self._name(group))
        return tensor

    def all_gather(self, original, group, tensor: torch.Tensor, dim: int = -1, output_tensor_list=None):
        if group.world_size == 1:
            return original(group, tensor, dim, output_tensor_list)
        parts = tensor.new_empty(group.world_size, *tensor.shape)
        self._gather(parts, tensor, self._name(group))
        if output_tensor_list is None:
            return torch.cat(parts.unbind(), dim)
        for output, part in zip(output_tensor_list, parts, strict=True):
            output.copy_(part)
        return None

    def all_gather_into_tensor(self, original, group, output: torch.Tensor, tensor: torch.Tensor) -> None:
        if group.world_size == 1:
            return original(group, output, tensor)
        return self._gather(output, tensor, self._name(group))

    def _name(self, group) -> str:
        """A group by its name: what runs at a replay keeps its arguments."""
        self.groups[group.unique_name] = group
        return group.unique_name

    def _sum_now(self, tensor: torch.Tensor, name: str) -> None:
        group, host = self.groups[name], tensor.cpu()
        tensor.copy_(self.mail.all_reduce(_gloo_sum, group, host) if self.mail else _gloo_sum(group, host))

    def _gather_now(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
        group, host = self.groups[name], tensor.cpu().unsqueeze(0)
        parts = self.mail.all_gather(_gloo_gather, group, host, 0) if self.mail else _gloo_gather(group, host, 0)
        output.copy_(parts.view(output.shape))


def _gloo_sum(group, tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor, group=group.cpu_group)
    return tensor


def _gloo_gather(group, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(group.world_size)]
    dist.all_gather(parts, tensor, group=group.cpu_group)
    return torch.cat(parts, dim)
