"""Every name of verl that PAT touches, in one table, read in verl 0.9.1; see ``pat.seam``.

Ray workers import verl while the plugin is loaded, so names are resolved on first use.
"""

from pat.seam import Seam

NAMES = {
    "PlatformBase": ("verl.plugin.platform.PlatformBase", ()),
    "PlatformRegistry": ("verl.plugin.platform.PlatformRegistry", ()),
    "RolloutReplica": ("verl.workers.rollout.replica.RolloutReplica", ()),
    "RolloutReplicaRegistry": ("verl.workers.rollout.replica.RolloutReplicaRegistry", ()),
    "TokenOutput": (
        "verl.workers.rollout.replica.TokenOutput",
        ("token_ids", "log_probs", "stop_reason", "extra_fields"),
    ),
    "BaseRollout": ("verl.workers.rollout.base.BaseRollout", ("config", "model_config", "device_mesh")),
    "ROLLOUT_REGISTRY": ("verl.workers.rollout.base._ROLLOUT_REGISTRY", ()),
    "HFModelConfig": ("verl.workers.config.HFModelConfig", ()),
    "omega_conf_to_dataclass": ("verl.utils.config.omega_conf_to_dataclass", ("config", "dataclass_type")),
    "distributed": ("verl.utils.distributed", ()),
    "initialize_global_process_group_ray": (
        "verl.utils.distributed.initialize_global_process_group_ray",
        ("timeout_second", "backend"),
    ),
    "fsdp_utils": ("verl.utils.fsdp_utils", ()),
    "CPUOffloadPolicy": ("verl.utils.fsdp_utils.CPUOffloadPolicy", ("pin_memory",)),
    "GlobalRequestLoadBalancer": ("verl.workers.rollout.router.GlobalRequestLoadBalancer", ("servers",)),
    "ReplayBuffer": ("verl.trainer.ppo.v1.replay_buffer.ReplayBuffer", ("poll_interval", "sampler_kwargs")),
}

METHODS = (
    ("PlatformRegistry", "register", ("platform",)),
    ("RolloutReplica", "launch_servers", ("self",)),
    ("RolloutReplicaRegistry", "register", ("name", "loader")),
    ("GlobalRequestLoadBalancer", "acquire_server", ("request_id",)),
    ("GlobalRequestLoadBalancer", "require_acquire_fields", ("self",)),
    ("GlobalRequestLoadBalancer", "release_server", ("server_id",)),
    ("GlobalRequestLoadBalancer", "get_all_servers", ("self",)),
    ("ReplayBuffer", "sample", ("self", "global_steps", "partition_id", "batch_size")),
    ("BaseRollout", "update_weights", ("self", "weights")),
    ("BaseRollout", "resume", ("self", "tags")),
    ("BaseRollout", "release", ("self",)),
)

seam = Seam("verl", "0.9.1", NAMES, METHODS)
check = seam.check


def __getattr__(name: str):
    value = globals()[name] = seam.get(name)
    return value
