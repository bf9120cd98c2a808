"""Methods of sglang.Engine that cannot work with PAT, each with the reason and what to do instead."""

from __future__ import annotations

BY_RANK = (
    "SGLang supports it with one data-parallel replica only, and the ranks of a size would each need their own part; "
    "use the engine's update_weights_from_tensor or update_weights_from_disk"
)
_LORA = (
    "adapters are sharded apart from the weights; merge the adapter and load the sum with update_weights_from_tensor"
)
_SESSION = "what a session keeps on a rank is not moved to another one; send the whole prompt, the cache shares it"
_RPC = (
    "SGLang's channel for it reaches no scheduler behind a data-parallel controller; take the weights from the "
    "checkpoint or the trainer that they came from"
)
_EXPERTS = "the counts are kept for one size, and lost at a switch; count in the trainer"
_WORKERS = "what is unfinished must be known in one process; send requests through the process that holds the engine"

METHODS = {
    "init_weights_update_group": BY_RANK,
    "destroy_weights_update_group": BY_RANK,
    "update_weights_from_distributed": BY_RANK,
    "update_weights_from_ipc": BY_RANK,
    "load_lora_adapter": _LORA,
    "load_lora_adapter_from_tensors": _LORA,
    "unload_lora_adapter": _LORA,
    "async_load_lora_adapter": _LORA,
    "async_unload_lora_adapter": _LORA,
    "open_session": _SESSION,
    "close_session": _SESSION,
    "collective_rpc": _RPC,
    "save_remote_model": _RPC,
    "save_sharded_model": _RPC,
    "start_expert_distribution_record": _EXPERTS,
    "stop_expert_distribution_record": _EXPERTS,
    "dump_expert_distribution_record": _EXPERTS,
    "attach_tokenizer_worker": _WORKERS,
}


def refusing(name: str, reason: str):
    def method(self, *args, **kwargs):
        raise NotImplementedError(f"pat.Engine.{name} is not supported: {reason}")

    method.__name__, method.__doc__ = name, f"Not supported: {reason}."
    return method


class Unsupported:
    """Part of ``Engine``: raises NotImplementedError for each of METHODS."""


for _name, _reason in METHODS.items():
    setattr(Unsupported, _name, refusing(_name, _reason))
Unsupported.attach_tokenizer_worker = classmethod(Unsupported.attach_tokenizer_worker)
