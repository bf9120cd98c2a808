"""verl on a machine without an accelerator: a ``cpu`` platform (verl 0.9.1), and two wraps that only it needs."""

from __future__ import annotations

import functools
import types
from contextlib import nullcontext

import torch

from pat.rl import verl_api as verl


class _CpuDevice(types.ModuleType):
    """torch.cpu plus the torch.cuda calls that verl makes; there is no device memory to speak of."""

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def mem_get_info(*args) -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def get_device_name(*args) -> str:
        return "cpu"

    @staticmethod
    def get_rng_state(*args) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *args) -> None:
        torch.set_rng_state(state)

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)


def _nothing(*args, **kwargs) -> None:
    pass


def _zero(*args, **kwargs) -> int:
    return 0


for _name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_per_process_memory_fraction"):
    setattr(_CpuDevice, _name, staticmethod(_nothing))
for _name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(_CpuDevice, _name, staticmethod(_zero))


def register() -> None:
    """Register the platform, which ``VERL_PLATFORM=cpu`` selects."""

    @verl.PlatformRegistry.register(platform="cpu")
    class PlatformCPU(verl.PlatformBase):
        device_name = vendor_name = "cpu"
        device_module = _CpuDevice("pat_cpu_device")

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        def get_device_capability(self, index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        def nvtx_range(self, message: str):
            return nullcontext()

        def ray_resource_name(self) -> str:
            return "GPU"  # logical ones: ray.init(num_gpus=N)

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False

        set_device = synchronize = set_allocator_settings = empty_cache = _nothing
        profiler_start = profiler_stop = cudart = _nothing


def wrap() -> None:
    """The two places of verl that assume an accelerator, made to work without one."""
    initialize = verl.initialize_global_process_group_ray
    if not hasattr(initialize, "__wrapped__"):
        # verl would build the backend "cpu:gloo,cpu:gloo", which torch refuses.
        @functools.wraps(initialize)
        def on_gloo(timeout_second=None, backend=None):
            return initialize(timeout_second, backend or "cpu:gloo")

        verl.distributed.initialize_global_process_group_ray = on_gloo
        policy = verl.CPUOffloadPolicy
        # Pinned memory needs an accelerator; reference policies ask for it.
        verl.fsdp_utils.CPUOffloadPolicy = lambda pin_memory=True: policy(pin_memory=False)
