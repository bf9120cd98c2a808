"""Every name of SGLang that PAT touches (and one of torch), in one table, read in SGLang 0.5.23.

Use ``sg.NAME``: a name is imported on first use, because SGLang must not be imported before the environment is
prepared (``pat.engine.cpu.environment``). ``check()`` verifies at start-up that each one still exists and still
takes the parameters that PAT passes, so that another SGLang version fails with a sentence instead of a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

from pat.engine.sglang_objects import COMMUNICATORS, METHODS, OBJECTS, WITH_OVERLAP
from pat.seam import Seam, SeamError, attributes

NAMES = {
    # process start-up and hooks
    "Engine": ("sglang.srt.entrypoints.engine.Engine", ()),
    "set_envs_and_config": ("sglang.srt.entrypoints.engine._set_envs_and_config", ("server_args",)),
    "kill_process_tree": (
        "sglang.srt.entrypoints.engine.kill_process_tree",
        ("parent_pid", "include_parent", "wait_timeout"),
    ),
    "init_tokenizer_manager": (
        "sglang.srt.entrypoints.engine.init_tokenizer_manager",
        ("server_args", "port_args", "TokenizerManagerClass"),
    ),
    "TokenizerManager": ("sglang.srt.managers.tokenizer_manager.TokenizerManager", ("server_args", "port_args")),
    "SignalHandler": ("sglang.srt.managers.tokenizer_manager.SignalHandler", ()),
    "FanOutCommunicator": ("sglang.srt.managers.communicator.FanOutCommunicator", ()),
    "SubprocessWatchdog": ("sglang.srt.utils.watchdog.SubprocessWatchdog", ("processes", "process_names")),
    "HookRegistry": ("sglang.srt.plugins.hook_registry.HookRegistry", ()),
    "HookType": ("sglang.srt.plugins.hook_registry.HookType", ()),
    "Scheduler": ("sglang.srt.managers.scheduler.Scheduler", ()),
    "TpModelWorker": (
        "sglang.srt.managers.tp_worker.TpModelWorker",
        ("server_args", "gpu_id", "nccl_port", "random_seed"),
    ),
    "DetokenizerManager": ("sglang.srt.managers.detokenizer_manager.DetokenizerManager", ()),
    "run_scheduler_process": (
        "sglang.srt.managers.scheduler.run_scheduler_process",
        ("server_args", "port_args", "gpu_id"),
    ),
    "eager_on_graph": (
        "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.eager_on_graph",
        ("fn",),
    ),
    "DataParallelController": ("sglang.srt.managers.data_parallel_controller.DataParallelController", ()),
    "ModelRunner": ("sglang.srt.model_executor.model_runner.ModelRunner", ()),
    # parallel context and communicators
    "parallel_state": ("sglang.srt.distributed.parallel_state", ()),
    "init_distributed_environment": (
        "sglang.srt.distributed.parallel_state.init_distributed_environment",
        ("backend", "world_size", "rank", "local_rank", "distributed_init_method", "timeout"),
    ),
    "init_model_parallel_group": (
        "sglang.srt.distributed.parallel_state.init_model_parallel_group",
        ("group_ranks", "local_rank", "backend", "group_name", "use_pynccl", "use_custom_allreduce"),
    ),
    "initialize_model_parallel": ("sglang.srt.distributed.parallel_state.initialize_model_parallel", ()),
    "init_parallel_groups": (
        "sglang.srt.distributed.bootstrap._init_parallel_groups",
        ("backend", "dist_init_method", "server_args", "gpu_id"),
    ),
    "GroupCoordinator": ("sglang.srt.distributed.parallel_state.GroupCoordinator", ()),
    "initialize_dp_attention": (
        "sglang.srt.layers.dp_attention.initialize_dp_attention",
        ("server_args",),
    ),
    "get_parallel": ("sglang.srt.runtime_context.get_parallel", ()),
    "get_exec": ("sglang.srt.runtime_context.get_exec", ()),
    "get_device": ("sglang.srt.runtime_context.get_device", ()),
    "set_group_timeout": ("torch.distributed.distributed_c10d._set_pg_timeout", ("timeout", "group")),
    # model and weights
    "initialize_model": (
        "sglang.srt.model_loader.loader._initialize_model",
        ("model_config", "load_config"),
    ),
    "set_default_torch_dtype": (
        "sglang.srt.model_loader.utils.set_default_torch_dtype",
        ("dtype",),
    ),
    "WeightUpdater": ("sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater", ()),
    "download_weights_from_hf": (
        "sglang.srt.model_loader.weight_utils.download_weights_from_hf",
        ("model_name_or_path", "cache_dir", "allow_patterns", "revision"),
    ),
    "filter_duplicate_safetensors_files": (
        "sglang.srt.model_loader.weight_utils.filter_duplicate_safetensors_files",
        ("hf_weights_files", "hf_folder", "index_file"),
    ),
    "filter_files_not_needed_for_inference": (
        "sglang.srt.model_loader.weight_utils.filter_files_not_needed_for_inference",
        ("hf_weights_files",),
    ),
    "QKVParallelLinear": ("sglang.srt.layers.linear.QKVParallelLinear", ()),
    "MergedColumnParallelLinear": ("sglang.srt.layers.linear.MergedColumnParallelLinear", ()),
    "ColumnParallelLinear": ("sglang.srt.layers.linear.ColumnParallelLinear", ()),
    "RowParallelLinear": ("sglang.srt.layers.linear.RowParallelLinear", ()),
    "VocabParallelEmbedding": ("sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding", ()),
    "UnquantizedLinearMethod": (
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod",
        (),
    ),
    "FusedMoE": ("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE", ()),
    "UnquantizedFusedMoEMethod": ("sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod", ()),
    # KV cache
    "MHATokenToKVPool": ("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool", ()),
    "TokenToKVPoolAllocator": ("sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator", ()),
    "ReqToTokenPool": ("sglang.srt.mem_cache.memory_pool.ReqToTokenPool", ()),
    "BasePrefixCache": ("sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache", ()),
    "match_kv_cache": (
        "sglang.srt.mem_cache.common.match_kv_cache",
        ("req", "tree_cache", "token_ids", "max_prefix_len"),
    ),
    "checkpoint_kv_cache": ("sglang.srt.mem_cache.common.checkpoint_kv_cache", ("req", "tree_cache")),
    # requests and sampling
    "Req": ("sglang.srt.managers.schedule_batch.Req", ()),
    "ScheduleBatch": ("sglang.srt.managers.schedule_batch.ScheduleBatch", ()),
    "FutureMap": ("sglang.srt.managers.overlap_utils.FutureMap", ()),
    "RelayPayload": ("sglang.srt.managers.overlap_utils.RelayPayload", ("bonus_tokens",)),
    "Penalizer": ("sglang.srt.sampling.penaltylib.orchestrator._BatchedPenalizer", ()),
    "ReqKvInfo": ("sglang.srt.managers.schedule_batch.ReqKvInfo", ()),
    "ReqLogprob": ("sglang.srt.managers.schedule_batch.ReqLogprob", ()),
    "SamplingParams": ("sglang.srt.sampling.sampling_params.SamplingParams", ("max_new_tokens",)),
    "SamplingBatchInfo": (
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo",
        (
            *("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "is_all_greedy", "is_any_greedy"),
            *("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling", "sampling_mask_batch_indices"),
        ),
    ),
    "Sampler": ("sglang.srt.layers.sampler.Sampler", ()),
    "SamplingMaskCapture": (
        "sglang.srt.layers.sampler._SamplingMaskCapture",
        ("weights", "token_ids", "selected_weight", "batch_rows"),
    ),
    "murmur_hash32": (
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        ("seed", "positions", "col_indices"),
    ),
    "apply_scaling_penalties": (
        "sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties",
        ("logits", "scaling_penalties"),
    ),
    "TOP_K_ALL": ("sglang.srt.sampling.sampling_params.TOP_K_ALL", ()),
    "SchedulerReqTimeStats": ("sglang.srt.observability.req_time_stats.SchedulerReqTimeStats", ()),
    # messages
    "PauseGenerationReqInput": ("sglang.srt.managers.io_struct.PauseGenerationReqInput", ("mode",)),
    "ContinueGenerationReqInput": (
        "sglang.srt.managers.io_struct.ContinueGenerationReqInput",
        ("torch_empty_cache",),
    ),
    "SetInternalStateReq": ("sglang.srt.managers.io_struct.SetInternalStateReq", ("server_args",)),
    "SetInternalStateReqOutput": ("sglang.srt.managers.io_struct.SetInternalStateReqOutput", ("updated",)),
    "UpdateWeightFromDiskReqInput": (
        "sglang.srt.managers.io_struct.UpdateWeightFromDiskReqInput",
        ("model_path", "load_format", "flush_cache"),
    ),
    "ReleaseMemoryOccupationReqInput": ("sglang.srt.managers.io_struct.ReleaseMemoryOccupationReqInput", ("tags",)),
    "ResumeMemoryOccupationReqInput": ("sglang.srt.managers.io_struct.ResumeMemoryOccupationReqInput", ("tags",)),
    "GPU_MEMORY_ALL_TYPES": ("sglang.srt.constants.GPU_MEMORY_ALL_TYPES", ()),
    "FlushCacheReqInput": ("sglang.srt.managers.io_struct.FlushCacheReqInput", ("timeout_s",)),
    "sock_recv": ("sglang.srt.managers.io_struct.sock_recv", ("socket",)),
    "sock_send": ("sglang.srt.managers.io_struct.sock_send", ("socket", "obj")),
    "set_random_seed": ("sglang.srt.utils.set_random_seed", ("seed",)),
}

# SGLang's penalties, and where each keeps what it has counted [requests, ...].
COUNTED = {
    "BatchedFrequencyPenalizer": "cumulated_frequency_penalties",
    "BatchedPresencePenalizer": "cumulated_presence_penalties",
    "BatchedRepetitionPenalizer": "cumulated_repetition_penalties",
    "BatchedMinNewTokensPenalizer": "len_output_tokens",
}

seam = Seam("sglang", "0.5.23", NAMES, METHODS, list(OBJECTS.values()))
path = seam.path


def check() -> None:
    """Raise SeamError if anything that PAT uses of SGLang is not as expected."""
    seam.check()
    if "kill_process_tree" not in seam.get("Engine").shutdown.__code__.co_names:
        raise SeamError(f"SGLang's Engine.shutdown calls no kill_process_tree: install sglang=={seam.written_for}")
    for name in ("_preprocess_logits", "_sample_from_probs"):
        if name not in seam.get("Sampler").forward.__code__.co_names:
            raise SeamError(f"SGLang's Sampler.forward calls no {name}: install sglang=={seam.written_for}")


def check_scheduler(scheduler) -> None:
    """Raise SeamError if a scheduler, or an object that it holds, lacks what PAT uses of it.

    Called while the scheduler is made: what the loop with overlap makes is told by the class alone.
    """
    runner = scheduler.tp_worker.model_runner
    live = {
        "scheduler": scheduler,
        "runner": runner,
        "pool": runner.token_to_kv_pool,
        "allocator": scheduler.token_to_kv_pool_allocator,
        "req_to_token_pool": scheduler.req_to_token_pool,
        "batch": scheduler.running_batch,
    }
    for name, owner in live.items():
        seam.require(owner, OBJECTS[name][1])
    if scheduler.enable_overlap and (lost := set(WITH_OVERLAP) - attributes(type(scheduler))):
        raise SeamError(f"SGLang's overlapping scheduler has no {', '.join(lost)}: install sglang=={seam.written_for}")


def check_tokenizer_manager(manager) -> None:
    """Raise SeamError if SGLang's tokenizer manager, or its watchdog, lacks what PAT uses of it."""
    seam.require(manager, OBJECTS["tokenizer_manager"][1] + COMMUNICATORS)
    seam.require(manager._subprocess_watchdog, OBJECTS["watchdog"][1])


def shutdown(engine, end_processes: Callable[[], object]) -> None:
    """SGLang's ``Engine.shutdown``, with ``end_processes`` where it would kill all children of this process."""
    original = seam.get("Engine").shutdown
    names = original.__globals__ | {"kill_process_tree": lambda *_, **__: end_processes()}
    FunctionType(original.__code__, names, closure=original.__closure__)(engine)


def __getattr__(name: str):
    value = globals()[name] = seam.get(name)
    return value
