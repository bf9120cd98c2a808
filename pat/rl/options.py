"""What of ``train.extra`` verl or PAT would refuse, found by composing verl's configuration (verl 0.9.1).

Composing takes under a second and imports Hydra, not verl. Nothing is done where ``train.extra`` is empty.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pat.config import Config, Section, stage_config
from pat.engine import options as engine_options
from pat.problems import shown
from pat.rl import job
from pat.rl.settings import Settings

ROLLOUT = "actor_rollout_ref.rollout"
# What PAT sets and counts on, and where it is set instead.
OURS = {
    "data.train_files": "set data.source",
    "data.val_files": "set data.source",
    "data.train_batch_size": "set rollout.prompts",
    "data.max_prompt_length": "set rollout.max_prompt",
    "data.max_response_length": "set rollout.max_response",
    "algorithm.rollout_correction.bypass_mode": "set train.bypass_old_log_prob",
    "actor_rollout_ref.model.path": "set model.source",
    "actor_rollout_ref.actor.optim.lr": "set train.lr",
    f"{ROLLOUT}.name": "every arm generates with PAT, the static ones too",
    f"{ROLLOUT}.n": "set rollout.samples",
    f"{ROLLOUT}.dtype": "set model.dtype",
    f"{ROLLOUT}.temperature": "set rollout.temperature",
    f"{ROLLOUT}.tensor_model_parallel_size": "set ranks and tp_sizes",
    f"{ROLLOUT}.router_config_path": "every arm deals its requests to the nodes alike",
    "trainer.logger": "PAT reads the iterations from verl's log file: its loggers are console and file",
    "trainer.experiment_name": "it is the arm",
    "trainer.n_gpus_per_node": "set ranks",
    "trainer.nnodes": "set train.nodes",
    "trainer.total_epochs": "set train.iterations",
    "trainer.total_training_steps": "set train.iterations",
    "trainer.test_freq": "responses of a validation would be counted as an iteration's",
    "trainer.val_before_train": "responses of a validation would be counted as an iteration's",
    "trainer.resume_mode": "set train.save_every",
    "trainer.resume_from_path": "set train.save_every",
    "trainer.v1.sampler.custom_sampler.path": "PAT's own measures generation to the moment, verl's to 2 s",
    "trainer.v1.sampler.custom_sampler.name": "PAT's own measures generation to the moment, verl's to 2 s",
}
SAVED = {  # besides, with train.save_every
    "trainer.save_freq": "set train.save_every",
    "trainer.default_local_dir": "a training goes on from where PAT looks for checkpoints; leave out train.save_every",
    "trainer.max_actor_ckpt_to_keep": "a training goes on from the last checkpoint whose iterations are recorded",
}
# What verl has and PAT has not: (value that is allowed, why no other is).
_LORA = "adapters are sharded apart from the weights"
_SYNCHRONOUS = "PAT is for synchronous training: an iteration's generation ends before its update begins"
_TP = "PAT divides a model by tensor parallelism only"
_OTHERS = "an iteration would have other responses than rollout.prompts x rollout.samples"
_SKIPPED = "nothing would be generated, hence nothing measured"
REFUSED: dict[str, tuple[Any, str]] = {
    "actor_rollout_ref.model.lora_rank": (0, _LORA),
    "actor_rollout_ref.model.lora.rank": (0, _LORA),
    "actor_rollout_ref.model.lora_adapter_path": (None, _LORA),
    "actor_rollout_ref.hybrid_engine": (True, _SYNCHRONOUS),
    "trainer.use_v1": (True, "its iterations are measured in verl's V1 trainer"),
    "trainer.v1.trainer_mode": ("sync", _SYNCHRONOUS),
    f"{ROLLOUT}.mode": ("async", "verl 0.9 serves requests in this mode only"),
    f"{ROLLOUT}.nnodes": (0, _SYNCHRONOUS),
    f"{ROLLOUT}.data_parallel_size": (1, _TP),
    f"{ROLLOUT}.expert_parallel_size": (1, _TP),
    f"{ROLLOUT}.pipeline_model_parallel_size": (1, _TP),
    f"{ROLLOUT}.quantization": (None, "packed quantised weights cannot be viewed as a narrower shard"),
    f"{ROLLOUT}.disaggregation.enabled": (False, "prefill and decode must share the ranks"),
    f"{ROLLOUT}.enable_rollout_routing_replay": (False, "it is recorded by location in the KV pool, which changes"),
    f"{ROLLOUT}.over_sample_rate": (0, _OTHERS),
    f"{ROLLOUT}.multi_turn.enable": (False, _OTHERS),
    f"{ROLLOUT}.agent.default_agent_loop": ("single_turn_agent", _OTHERS),
    "algorithm.filter_groups.enable": (False, _OTHERS),
    "trainer.val_only": (False, _SKIPPED),
    "skip.rollout.enable": (False, _SKIPPED),
    "skip.rollout_tq.enable": (False, _SKIPPED),
    "skip.async_rollout.enable": (False, _SKIPPED),
}


def problems(config: Config) -> Iterator[tuple[str, str, str]]:
    """(key of train.extra, what it got, what is allowed) for each that verl or PAT would refuse once it runs."""
    extra = config.train.extra
    if not extra or not config.arms or not (folder := defaults()):
        return
    ours = _ours(stage_config(config, f"train-{config.arms[0]}"), config.data.train_size)
    told, refusal = _compose(folder, ours | extra)
    if refusal:
        refused = list(_refused_by_verl(folder, ours, extra))
        yield from refused or [("", shown(dict(extra)), f"what verl's configuration takes; it says: {refusal}")]
        extra = {key: value for key, value in extra.items() if key not in {each for each, _, _ in refused}}
        told, refusal = _compose(folder, ours | extra)
    if refusal:
        return  # told above
    fixed = OURS | (SAVED if config.train.save_every else {})
    for key, way in fixed.items():
        if key in ours and _differs(value := _at(told, key), ours[key]):
            yield _cause(extra, key), shown(value), f"no value of its own: {way}"
    for key, (allowed, reason) in REFUSED.items():
        if (value := _at(told, key)) != allowed:
            yield _cause(extra, key), shown(value), f"{shown(allowed)} ({reason})"
    if _at(told, f"{ROLLOUT}.top_k") == 1:
        yield _cause(extra, f"{ROLLOUT}.top_k"), "1", "more: greedy answers to a prompt are equal and teach nothing"
    given = _at(told, f"{ROLLOUT}.engine_kwargs.sglang") or {}
    for name, allowed in engine_options.problems({k: v for k, v in given.items() if k not in config.rollout.sglang}):
        key = f"{ROLLOUT}.engine_kwargs.sglang.{name}"
        yield _cause(extra, key), shown(given[name]), allowed
    try:
        Settings.from_verl(_at(told, f"{ROLLOUT}.custom"), config.ranks)
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(map(str, (ROLLOUT, "custom", "pat", *item["loc"])))
            yield _cause(extra, key), shown(item["input"]), f"a setting of PAT ({item['msg']})"


def defaults() -> Path | None:
    """The folder of verl's configuration; None where it is not installed."""
    package = importlib.util.find_spec("verl")
    return package and Path(package.submodule_search_locations[0], "trainer", "config")


def _ours(cfg: Section, rows: int) -> dict[str, Any]:
    """What PAT tells verl by itself; the paths are of no folder in particular."""
    train = cfg.train.model_copy(update={"extra": {}})
    out = Path("results")
    ray = job.local_ray(cfg.ranks, "/tmp")
    return job.overrides(cfg.model_copy(update={"train": train}), out, "tp1", out, ray, out, None, rows)


def _compose(folder: Path, values: Mapping[str, Any]) -> tuple[Any, str]:
    """verl's configuration with ``values``, or why Hydra refuses them."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    words = [word for word in job.words(values) if not word.startswith("hydra.")]
    try:
        with initialize_config_dir(str(folder), version_base=None):
            told = compose("ppo_trainer", overrides=words)
            OmegaConf.resolve(told.trainer)
            return told, ""
    except (HydraException, OmegaConfBaseException) as error:
        return None, " ".join(str(error).split())[:200]


def _refused_by_verl(folder: Path, ours: Mapping, extra: Mapping) -> Iterator[tuple[str, str, str]]:
    """The keys that Hydra refuses: each is tried alone."""
    known = list(_keys(_compose(folder, ours)[0]))
    for key, value in extra.items():
        if reason := _compose(folder, {**ours, key: value})[1]:
            name = key.lstrip("+~")
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8) if name not in known else []
            hint = f" (did you mean {close[0]}?)" if close else ""
            yield key, shown(value), f"what verl's configuration takes{hint}; it says: {reason}"


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    from omegaconf import DictConfig

    for key in node:
        yield f"{prefix}{key}"
        if isinstance(inner := node._get_node(key), DictConfig) and not inner._is_none() and not inner._is_missing():
            yield from _keys(inner, f"{prefix}{key}.")


def _at(told: Any, key: str) -> Any:
    from omegaconf import OmegaConf

    value = OmegaConf.select(told, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _differs(value: Any, ours: Any) -> bool:
    return value != (str(ours) if isinstance(ours, Path) else ours)


def _cause(extra: Mapping[str, Any], key: str) -> str:
    """The key of ``train.extra`` that has set ``key``: itself, with a sign of Hydra's, or one that it is inside of."""
    named = {each.lstrip("+~"): each for each in extra}
    parts = key.split(".")
    inside = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((named[name] for name in inside if name in named), key)
