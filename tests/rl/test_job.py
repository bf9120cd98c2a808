"""An arm's job: what verl is told, in words that Hydra reads back as they were meant."""

import importlib.util
import re
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from pat.config import Config, Train, stage_config
from pat.engine.cpu import environment, stand_ins
from pat.rl import job
from pat.rl.router import Router
from pat.rl.settings import Settings

PROJECT = Path(__file__).parents[2]
ARMS = ("tp1", "tp2", "pat")


def config(arm, **sections):
    """What stage train-ARM reads of config/ci.yaml, with some sections changed."""
    raw = yaml.safe_load((PROJECT / "config" / "ci.yaml").read_text())
    del raw["experiments"]
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values if isinstance(values, dict) else values
    return stage_config(Config.model_validate(raw), f"train-{arm}")


@pytest.fixture
def experiment(tmp_path):
    """An experiment's folder, with a space in its name, and 16 prompts."""
    folder = tmp_path / "my experiment"
    write_prompts(folder, 16)
    return folder


def write_prompts(folder, rows):
    (folder / "data").mkdir(parents=True, exist_ok=True)
    pl.DataFrame({"prompt": ["x"] * rows}).write_parquet(folder / "data" / "train.parquet")
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "pat.json").write_text('{"end_texts": ["\\n", "a, b: {c}"]}')


def overrides(experiment, arm="pat", ray=None, checkpoint=None, **sections):
    out, ray = experiment / "train" / arm, ray or job.local_ray(2, "/tmp/ray")
    out.mkdir(parents=True, exist_ok=True)
    return job.overrides(
        config(arm, **sections), experiment, arm, out, ray, experiment / "checkpoints" / arm, checkpoint
    )


def composed(values):
    """verl's whole configuration as its main sees it; Hydra refuses a key without + that is not there."""
    defaults = Path(importlib.util.find_spec("verl").submodule_search_locations[0], "trainer", "config")
    said = [word for word in job.command(values)[3:] if not word.startswith("hydra.")]
    with initialize_config_dir(str(defaults), version_base=None):
        return compose("ppo_trainer", overrides=said)


@pytest.mark.parametrize("arm", ARMS)
def test_verl_knows_every_key_and_reads_the_arms_settings_back(experiment, arm):
    cfg = config(arm)
    told = composed(overrides(experiment, arm))
    assert told.trainer.total_training_steps == cfg.train.iterations
    assert told.trainer.experiment_name == arm
    assert told.actor_rollout_ref.model.path == str(experiment / "model")
    assert told.data.train_files == str(experiment / "data" / "train.parquet")
    assert told.data.train_batch_size == cfg.rollout.prompts
    assert told.actor_rollout_ref.actor.optim.lr == cfg.train.lr
    assert (told.actor_rollout_ref.rollout.name, told.actor_rollout_ref.rollout.n) == (
        "pat",
        cfg.rollout.samples,
    )
    settings = Settings.from_verl(told.actor_rollout_ref.rollout.custom, cfg.ranks)
    assert (settings.policy, settings.tp_sizes, settings.seed) == (arm, cfg.tp_sizes, cfg.seed)
    assert settings.requests == cfg.rollout.prompts * cfg.rollout.samples
    assert settings.lengths == cfg.rollout.lengths
    assert settings.log == experiment / "train" / arm / "rollout"
    assert (settings.deadline_s, settings.kv_tokens) == (cfg.rollout.deadline_s, cfg.rollout.kv_tokens)


def test_only_the_predictive_arm_is_told_of_policy_and_predictor(experiment):
    policy = {"margin": 0.3, "max_switch_share": 0.2, "kv": "recompute", "max_switches": 7}
    told = composed(overrides(experiment, "pat", policy=policy)).actor_rollout_ref.rollout.custom
    settings = Settings.from_verl(told, 2)
    assert settings.predictor == experiment / "predictor" / "model.json"
    assert settings.policy_settings == policy
    static = composed(overrides(experiment, "tp2", policy=policy)).actor_rollout_ref.rollout.custom
    assert not {*policy, "predictor"} & set(static.pat)


def test_a_threshold_is_told_how_kv_follows_and_nothing_else_of_the_policy(experiment):
    policy = {"margin": 0.3, "kv": "recompute"}
    told = composed(overrides(experiment, "threshold6", policy=policy)).actor_rollout_ref.rollout.custom
    settings = Settings.from_verl(told, 2)
    assert (settings.policy, settings.kv, settings.predictor) == ("threshold6", "recompute", None)
    assert "margin" not in told.pat


def test_options_of_sglang_reach_the_rollout(experiment):
    options = {"mem_fraction_static": 0.6, "cuda_graph_bs_decode": [1, 2, 4]}
    told = composed(overrides(experiment, rollout={"sglang": options}))
    assert told.actor_rollout_ref.rollout.engine_kwargs.sglang == options


def test_arms_differ_in_nothing_that_the_trainer_reads(experiment):
    tp1, tp2, pat = ({k: v for k, v in overrides(experiment, arm).items() if "custom.pat" not in k} for arm in ARMS)
    differing = {key for key in tp1 if not tp1[key] == tp2[key] == pat[key]}
    assert differing == {"trainer.experiment_name", "trainer.default_local_dir", "hydra.run.dir"}


def test_natural_lengths_stay_natural(experiment):
    told = composed(overrides(experiment, rollout={"lengths": None}))
    assert Settings.from_verl(told.actor_rollout_ref.rollout.custom, 2).lengths is None


def test_the_users_own_verl_settings_win(experiment):
    extra = {
        "trainer.save_freq": 5,
        "data.shuffle": True,
        "+my.own": "words and more",
        "trainer.project_name": "mine",
    }
    told = composed(overrides(experiment, train={"extra": extra}))
    assert (told.trainer.save_freq, told.data.shuffle) == (5, True)
    assert (told.my.own, told.trainer.project_name) == ("words and more", "mine")


@pytest.mark.parametrize(
    "value",
    [
        *(1, 0.5, 1e-6, 1e20, True, False, None, [1, 2], ["a", "b c"], [], {"a": 1, "b": [2]}),
        *("word", "two words", "a,b", "a=b", Path("/a b/c=d,e"), Path("/o'neil/model")),
    ],
)
def test_a_value_is_read_back_as_it_was(value):
    (word,) = job.command({"key": value})[3:]
    override = OverridesParser.create().parse_override(word)
    assert not override.is_sweep_override()
    read = override.value()
    read = [getattr(part, "text", part) for part in read] if isinstance(read, list) else read
    assert getattr(read, "text", read) == (str(value) if isinstance(value, Path) else value)


@pytest.mark.parametrize(("rows", "prompts", "iterations"), [(16, 4, 3), (16, 4, 9), (15, 10, 3), (7, 4, 2), (4, 4, 5)])
def test_the_epochs_hold_as_many_whole_batches_as_iterations(experiment, rows, prompts, iterations):
    """verl leaves out the last, incomplete batch of an epoch."""
    write_prompts(experiment, rows)
    told = overrides(experiment, rollout={"prompts": prompts}, train={"iterations": iterations})
    batches = sum(len(range(0, rows - prompts + 1, prompts)) for _ in range(told["trainer.total_epochs"]))
    assert batches >= iterations


def test_the_command_is_verls_main_in_this_python(experiment):
    assert job.command({"a": 1}) == [sys.executable, "-m", "verl.trainer.main_ppo", "a=1"]


def test_files_that_verl_loads_are_there(experiment):
    told = overrides(experiment)
    for kind in ("reward.custom_reward_function", "trainer.v1.sampler.custom_sampler"):
        source = Path(told[f"{kind}.path"]).read_text()
        assert f" {told[f'{kind}.name']}(" in source


def test_the_users_own_environment_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("MY_OWN", "kept")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    told = job.variables(tmp_path)
    assert (told["WANDB_MODE"], told["MY_OWN"], told["HF_HUB_OFFLINE"]) == ("online", "kept", "1")
    assert told["VERL_USE_EXTERNAL_MODULES"] == "pat.rl.plugin"
    assert told["VERL_FILE_LOGGER_PATH"] == str(tmp_path / "verl.jsonl")


@pytest.mark.skipif(environment.has_accelerator(), reason="for machines without an accelerator")
def test_without_a_gpu_every_process_finds_the_stand_ins(tmp_path, monkeypatch):
    monkeypatch.setattr(stand_ins, "needed", lambda: True)
    monkeypatch.setenv("PYTHONPATH", "/first")
    told = job.variables(tmp_path)
    assert told["PYTHONPATH"].split(":") == ["/first", str(stand_ins.STUBS)]
    assert told["VERL_PLATFORM"] == "cpu"


def test_pats_own_log_is_where_it_is_looked_for_whatever_the_user_has_set(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "/somewhere/else.jsonl")
    assert job.variables(tmp_path)["VERL_FILE_LOGGER_PATH"] == str(tmp_path / "verl.jsonl")


def test_nodes_share_an_iteration_and_its_requests_are_dealt_to_them_in_turn(experiment):
    values = overrides(experiment, ray={"address": "10.0.0.1:6379"}, train={"nodes": 2, "micro_batch": 2})
    told = composed(values)
    job.write_router(config("pat"), experiment / "train" / "pat")
    assert (told.trainer.nnodes, told.trainer.n_gpus_per_node) == (2, 2)
    assert told.actor_rollout_ref.rollout.tensor_model_parallel_size == 2  # a replica stays inside a node
    assert Settings.from_verl(told.actor_rollout_ref.rollout.custom, 2).requests == 8
    assert (told.ray_kwargs.ray_init.address, told.ray_kwargs.ray_init.num_cpus) == ("10.0.0.1:6379", None)
    assert yaml.safe_load(Path(told.actor_rollout_ref.rollout.router_config_path).read_text()) == {
        "router_class": f"{Router.__module__}.{Router.__name__}",
        "requests": 16,
        "samples": 4,
    }
    alone = composed(overrides(experiment))
    assert (alone.trainer.nnodes, alone.actor_rollout_ref.rollout.router_config_path) == (1, None)


def test_a_training_goes_on_from_the_checkpoint_that_it_is_given(experiment):
    checkpoint = experiment / "checkpoints" / "pat" / "global_step_4"
    told = composed(overrides(experiment, checkpoint=checkpoint, train={"save_every": 2})).trainer
    assert (told.save_freq, told.default_local_dir) == (2, str(experiment / "checkpoints" / "pat"))
    assert (told.resume_mode, told.resume_from_path) == ("resume_path", str(checkpoint))
    told = composed(overrides(experiment, train={"save_every": 2})).trainer
    assert (told.save_freq, told.resume_mode) == (2, "disable")
    assert composed(overrides(experiment)).trainer.save_freq == -1


def test_slurms_variables_of_other_vendors_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert job.variables(tmp_path)["ROCR_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    told = job.variables(tmp_path)
    assert told["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "ROCR_VISIBLE_DEVICES" not in told


DOCS = (PROJECT / "docs" / "training.md").read_text()


@pytest.mark.parametrize(
    "text", [t for t in re.findall(r"^```yaml\n(.*?)^```", DOCS, re.M | re.S) if "model:" not in t]
)
def test_settings_of_the_documentation_are_accepted_and_reach_verl(experiment, text):
    said = yaml.safe_load(text)
    train = Train.model_validate(said["train"])
    rollout = {"prompts": 16, "samples": 4}  # enough for all ranks
    values = overrides(experiment, ray={"address": "a:1"}, rollout=rollout, **said)
    told = composed(values).trainer
    assert told.nnodes == train.nodes
    assert told.save_freq == (train.save_every or train.extra.get("trainer.save_freq", -1))
    folder = train.extra.get("trainer.default_local_dir", str(experiment))
    assert told.default_local_dir.startswith(folder)


def test_the_reward_is_told_which_end_tokens_a_response_shows_unless_it_is_the_users_own(experiment):
    told = composed(overrides(experiment)).reward.custom_reward_function
    assert told.reward_kwargs.ends == ["\n", "a, b: {c}"]
    own = composed(overrides(experiment, train={"extra": {"reward.custom_reward_function.path": "/mine.py"}}))
    assert own.reward.custom_reward_function.path == "/mine.py"
    assert "ends" not in own.reward.custom_reward_function.get("reward_kwargs", {})
