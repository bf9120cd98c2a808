"""What must be set before SGLang is imported on a machine without a GPU (read in SGLang 0.5.23)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from pat.engine.cpu import stand_ins

# Each rank has one core: a second thread on it would only wait for the first, spinning. Not a default but set, since
# Snakemake gives every job a number of threads in these variables.
ONE_THREAD = {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM", "GOTO")
}
# SGLang imports every model that it has, 5 s in each process on a core; here only the families that PAT switches.
MODELS = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def has_accelerator() -> bool:
    """Whether torch finds one; without a device file there is none, and torch need not be imported to know."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return False
    import torch

    return torch.cuda.is_available()


def prepare() -> None:
    """Set the variables and the import path that SGLang's CPU engine needs; before SGLang is imported.

    Does nothing on a machine with an accelerator. But for the number of threads, values that are set are kept.
    """
    if has_accelerator():
        return
    defaults = {
        "SGLANG_USE_CPU_ENGINE": "1",  # without it RoPE asks for vllm
        "TORCH_COMPILE_DISABLE": "1",  # else the first tp > 1 forward compiles for seconds
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models()),
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    os.environ.update(ONE_THREAD)
    stand_ins.add()


def _other_models() -> list[str]:
    folder = Path(importlib.util.find_spec("sglang").submodule_search_locations[0], "srt", "models")
    return sorted(file.stem for file in folder.glob("*.py") if file.stem not in (*MODELS, "__init__", "registry"))


def thread_binding(ranks: int) -> dict[str, str]:
    """Variable that SGLang asserts with more ranks than NUMA nodes; PAT pins each rank to a core itself."""
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % os.cpu_count()) for rank in range(ranks))}


def pin_to_core(rank: int) -> None:
    """Keep this rank's process on one core: two spinning ranks on one core would wait for each other."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def attention() -> dict:
    """On NVIDIA's GPUs what verl's own SGLang rollout sets, whose reason is that graphs of FA3, SGLang's choice on
    Hopper, break from SGLang 0.5.12 on; on Blackwell SGLang's choice wants a page size above 1, which PAT has not.
    """
    import torch

    return {"attention_backend": "flashinfer"} if torch.version.cuda else {}


def server_args() -> dict:
    """Arguments of sglang.Engine for this machine; a caller's own values win over them."""
    seeded = {"sampling_backend": "pytorch"}  # the one that honours a request's seed
    if has_accelerator():
        # With it on, SGLang would set a workspace for one size up, and rebuild it under the graphs of the others.
        made = seeded | {"enforce_disable_flashinfer_allreduce_fusion": True} | attention()
        parts = "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")  # do not reach each other, and have no index
        return made | ({"disable_custom_all_reduce": True} if parts else {})
    return seeded | {
        "device": "cpu",
        "attention_backend": "torch_native",
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # an idle replica would otherwise spin and take a core from the others
        "disable_overlap_schedule": True,  # there is no device to overlap with
        "max_total_tokens": 16384,
    }


def kernels() -> dict:
    """Arguments of sglang.Engine that say what "auto" means, the only other value that a caller may give.

    On Blackwell SGLang's own choice would be kernels that repack experts, or that nobody has tried on a view with
    strides, as o_proj and down_proj are at a wide size.
    """
    return {"bf16_gemm_backend": "torch", "moe_runner_backend": "triton"} if has_accelerator() else {}
