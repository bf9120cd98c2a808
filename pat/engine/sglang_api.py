"""Every name of SGLang that PAT touches, in one table, read in SGLang 0.5.23.

Use ``sg.NAME``: a name is imported on first use, because SGLang must not be imported before the environment is
prepared (``pat.engine.cpu.environment``). ``check()`` verifies at start-up that each one still exists and still
takes the parameters that PAT passes, so that another SGLang version fails with a sentence instead of a wrong token.
"""

from __future__ import annotations

from pat.seam import Seam

NAMES = {
    # process start-up and hooks
    "Engine": ("sglang.srt.entrypoints.engine.Engine", ()),
    "set_envs_and_config": ("sglang.srt.entrypoints.engine._set_envs_and_config", ("server_args",)),
    "HookRegistry": ("sglang.srt.plugins.hook_registry.HookRegistry", ()),
    "HookType": ("sglang.srt.plugins.hook_registry.HookType", ()),
    "Scheduler": ("sglang.srt.managers.scheduler.Scheduler", ()),
    "TpModelWorker": (
        "sglang.srt.managers.tp_worker.TpModelWorker",
        ("server_args", "gpu_id", "nccl_port", "random_seed"),
    ),
    "DataParallelController": ("sglang.srt.managers.data_parallel_controller.DataParallelController", ()),
    # parallel context and communicators
    "parallel_state": ("sglang.srt.distributed.parallel_state", ()),
    "init_distributed_environment": (
        "sglang.srt.distributed.parallel_state.init_distributed_environment",
        ("backend", "world_size", "rank", "local_rank", "distributed_init_method", "timeout"),
    ),
    "init_model_parallel_group": (
        "sglang.srt.distributed.parallel_state.init_model_parallel_group",
        ("group_ranks", "local_rank", "backend", "group_name"),
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
    "get_device": ("sglang.srt.runtime_context.get_device", ()),
    # model and weights
    "initialize_model": (
        "sglang.srt.model_loader.loader._initialize_model",
        ("model_config", "load_config"),
    ),
    "set_default_torch_dtype": (
        "sglang.srt.model_loader.utils.set_default_torch_dtype",
        ("dtype",),
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
    # KV cache
    "MHATokenToKVPool": ("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool", ()),
    "InsertParams": (
        "sglang.srt.mem_cache.base_prefix_cache.InsertParams",
        ("key", "value", "prev_prefix_len"),
    ),
    "MatchPrefixParams": ("sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams", ("key",)),
    "RadixKey": ("sglang.srt.mem_cache.radix_cache.RadixKey", ("token_ids", "extra_key", "cache_salt")),
    "RadixCache": ("sglang.srt.mem_cache.radix_cache.RadixCache", ()),
    # requests and sampling
    "SamplingBatchInfo": ("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo", ()),
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
        ("model_path",),
    ),
    "sock_recv": ("sglang.srt.managers.io_struct.sock_recv", ()),
    "set_random_seed": ("sglang.srt.utils.set_random_seed", ("seed",)),
}

METHODS = (
    ("Scheduler", "init_tp_model_worker", ("self",)),
    ("Scheduler", "run_batch", ("self", "batch")),
    ("Scheduler", "process_batch_result", ("self", "batch", "result")),
    ("Scheduler", "on_idle", ("self",)),
    ("Scheduler", "send_abort_output", ("self", "abort_req", "req")),
    ("Scheduler", "set_internal_state", ("self", "recv_req")),
    ("Scheduler", "pause_generation", ("self", "recv_req")),
    ("Scheduler", "continue_generation", ("self", "recv_req")),
    ("Scheduler", "flush_cache", ("self", "empty_cache")),
    ("Scheduler", "_add_request_to_queue", ("self", "req")),
    ("DataParallelController", "event_loop", ("self",)),
    ("DataParallelController", "send_control_message", ("self", "obj")),
    ("DataParallelController", "_refresh_active_workers", ("self",)),
    ("GroupCoordinator", "all_reduce", ("self", "input_")),
    ("GroupCoordinator", "all_gather", ("self", "input_", "dim")),
    ("SamplingBatchInfo", "from_schedule_batch", ("batch", "vocab_size")),
    ("MHATokenToKVPool", "_build_kv_buffer_descs", ("self",)),
    ("MHATokenToKVPool", "_init_data_ptrs_and_strides", ("self",)),
    ("RadixCache", "path_device_indices", ("self",)),
)

seam = Seam("sglang", "0.5.23", NAMES, METHODS)
check, path = seam.check, seam.path


def __getattr__(name: str):
    value = globals()[name] = seam.get(name)
    return value
