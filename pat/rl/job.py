"""One verl job as a command: the Hydra overrides and the environment of an arm (verl 0.9.1)."""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pat.engine.cpu import environment, stand_ins
from pat.rl import processes

HERE = Path(__file__).parent
ROUTER = "router.yaml"
# verl writes the metrics of an iteration after its checkpoint. If it ends in between, the one before is needed.
KEPT = 2


def overrides(
    cfg,
    experiment: Path,
    arm: str,
    out: Path,
    ray: dict[str, Any],
    checkpoints: Path,
    checkpoint: Path | None,
    rows: int | None = None,
) -> dict[str, Any]:
    """Hydra overrides of ``python -m verl.trainer.main_ppo`` for one arm; a key with + is new to verl.

    cfg: the sections of stage train-ARM; out: where the arm's files go; ray: arguments of ray.init, see ``local_ray``.
    checkpoints: where those of ``train.save_every`` go; checkpoint: one to go on from. ``cfg.train.extra`` wins.
    rows: prompts to train on; None: as many as the experiment has.
    """
    rollout, train = cfg.rollout, cfg.train
    model, data = (experiment / "model").absolute(), (experiment / "data").absolute()
    actor, ref = "actor_rollout_ref.actor", "actor_rollout_ref"
    rows = rows or _rows(data / "train.parquet")
    batches = rows // rollout.prompts  # verl drops a last batch that is not full
    values: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": train.bypass_old_log_prob,
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "val.parquet",
        "data.train_batch_size": rollout.prompts,
        "data.max_prompt_length": rollout.max_prompt,
        "data.max_response_length": rollout.max_response,
        "data.shuffle": False,  # every arm sees the same prompts in the same order
        "data.dataloader_num_workers": 0,
        f"{ref}.model.path": model,
        f"{ref}.model.use_remove_padding": False,
        f"{ref}.model.enable_gradient_checkpointing": environment.has_accelerator(),  # it saves memory, and costs time
        f"+{ref}.model.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": train.lr,
        f"{actor}.ppo_mini_batch_size": rollout.prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": train.micro_batch,
        f"{actor}.use_kl_loss": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"+{actor}.fsdp_config.mixed_precision.param_dtype": train.mixed_precision,
        f"{ref}.rollout.name": "pat",
        f"{ref}.rollout.n": rollout.samples,
        f"{ref}.rollout.dtype": cfg.model.dtype,
        f"{ref}.rollout.temperature": rollout.temperature,
        f"{ref}.rollout.tensor_model_parallel_size": cfg.ranks,
        f"{ref}.rollout.log_prob_micro_batch_size_per_gpu": train.micro_batch,
        f"{ref}.rollout.agent.num_workers": 1,
        f"{ref}.rollout.max_num_seqs": max(64, rollout.prompts * rollout.samples),
        "reward.custom_reward_function.path": HERE / "reward.py",
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.v1.sampler.custom_sampler.path": HERE / "sampler.py",
        "trainer.v1.sampler.custom_sampler.name": "PromptReplayBuffer",
        "+trainer.v1.sampler.sampler_kwargs.samples": rollout.samples,
        "trainer.logger": ["console", "file"],
        "trainer.project_name": "pat",
        "trainer.experiment_name": arm,
        "trainer.n_gpus_per_node": cfg.ranks,
        "trainer.nnodes": train.nodes,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": train.save_every or -1,
        "trainer.max_actor_ckpt_to_keep": KEPT if train.save_every else None,
        "trainer.resume_mode": "resume_path" if checkpoint else "disable",
        "trainer.resume_from_path": checkpoint.absolute() if checkpoint else None,
        "trainer.total_epochs": math.ceil(train.iterations / batches),
        "trainer.total_training_steps": train.iterations,
        "trainer.default_local_dir": checkpoints.absolute() if train.save_every else out / "checkpoints",
        "hydra.run.dir": out / "hydra",
    }
    if train.nodes > 1:
        values[f"{ref}.rollout.router_config_path"] = out.absolute() / ROUTER
    if not environment.has_accelerator():
        values["trainer.device"] = "cpu"
    if not train.own_reward:
        known = model / "pat.json"  # not there yet when the options are checked before anything runs
        facts = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
        values["+reward.custom_reward_function.reward_kwargs.ends"] = facts.get("end_texts", [])
    values |= {f"{'' if key == 'num_cpus' else '+'}ray_kwargs.ray_init.{key}": value for key, value in ray.items()}
    values |= {f"+{ref}.rollout.engine_kwargs.sglang.{key}": value for key, value in rollout.sglang.items()}
    settings = rollout_settings(cfg, experiment, arm, out)
    values |= {f"+{ref}.rollout.custom.pat.{key}": value for key, value in settings.items()}
    return values | dict(train.extra)


def local_ray(ranks: int, folder: str) -> dict[str, Any]:
    """Arguments of ray.init for a Ray of this job alone, on this machine."""
    arguments: dict[str, Any] = {"include_dashboard": False, "_temp_dir": folder}
    if not environment.has_accelerator():
        # Logical ones: verl's actors ask for some CPUs each, and mostly wait.
        arguments |= {"num_cpus": max(8, 4 * ranks), "num_gpus": ranks}
    return arguments


def write_router(cfg, out: Path) -> None:
    """The file that makes verl deal an iteration's requests to the servers of all nodes by ``pat.rl.router``."""
    requests = cfg.rollout.prompts * cfg.rollout.samples
    text = f"router_class: pat.rl.router.Router\nrequests: {requests}\nsamples: {cfg.rollout.samples}\n"
    (out / ROUTER).write_text(text, encoding="utf-8")


def rollout_settings(cfg, experiment: Path, arm: str, out: Path) -> dict[str, Any]:
    """``rollout.custom.pat``; see ``pat.rl.settings``."""
    rollout = cfg.rollout
    settings: dict[str, Any] = {
        "policy": arm,
        "tp_sizes": list(cfg.tp_sizes),
        "seed": cfg.seed,
        "requests": rollout.prompts * rollout.samples // cfg.train.nodes,
        "lengths": list(rollout.lengths) if rollout.lengths else None,
        "deadline_s": rollout.deadline_s,
        "kv_tokens": rollout.kv_tokens,
        "log": (out / "rollout").absolute(),
    }
    if arm.startswith("threshold"):
        settings["kv"] = cfg.policy.kv
    if arm == "pat":
        settings |= cfg.policy.model_dump()
        settings["predictor"] = (experiment / "predictor" / "model.json").absolute()
    return settings


def command(values: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "verl.trainer.main_ppo", *words(values)]


def words(values: Mapping[str, Any]) -> list[str]:
    """``values`` as Hydra's overrides."""
    return [f"{key}={_hydra(value)}" for key, value in values.items()]


def _hydra(value: Any) -> str:
    """A value in Hydra's grammar; strings are quoted, since a bare comma, for one, would mean a sweep."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if isinstance(value, (str, Path)):
        return "'" + str(value).replace("'", "\\'") + "'"
    return json.dumps(value)


def variables(out: Path, nodes: int = 1) -> dict[str, str]:
    """The job's environment: this process's, and what verl and Ray need; values that only tune are kept if set."""
    modules = [os.environ.get("VERL_USE_EXTERNAL_MODULES"), "pat.rl.plugin"]  # an error in a module ends the job
    needed = {
        "VERL_FILE_LOGGER_PATH": str(out.absolute() / "verl.jsonl"),
        "VERL_USE_EXTERNAL_MODULES": ",".join(filter(None, modules)),
    }
    values = {
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_niceness": "0",  # Ray's 15 lets anything else on the machine stretch what is measured
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",  # model and data are files by now
        "TRANSFORMERS_OFFLINE": "1",
    }
    if not environment.has_accelerator():
        values |= {
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",  # picks verl's FSDP engine
        }
        if nodes == 1:
            values["GLOO_SOCKET_IFNAME"] = "lo"
    values |= processes.one_vendor()
    values |= needed
    if environment.has_accelerator():
        return values
    values |= environment.ONE_THREAD
    if stand_ins.needed():
        # In every process of the job from its start: verl imports transformers before it loads plugins.
        values["PYTHONPATH"] = os.pathsep.join(filter(None, [values.get("PYTHONPATH"), str(stand_ins.STUBS)]))
    return values


def with_token(variables: Mapping[str, str], file: Path) -> dict[str, str]:
    """``variables`` with a token of this training's own for Ray, made in ``file``, which all its nodes must see.

    Ray by itself would keep one in ~/.ray for all of a user's, and fail where that cannot be written to.
    """
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32), encoding="utf-8")
    others = {name: value for name, value in variables.items() if name != "RAY_AUTH_TOKEN"}  # it would go first
    return others | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}


def _rows(parquet: Path) -> int:
    import polars as pl

    return pl.scan_parquet(parquet).select(pl.len()).collect().item()
