"""What of train.extra verl or PAT would refuse is told before anything starts."""

import subprocess
import sys

import yaml

from pat.config import Config
from pat.rl import options
from tests.workflow.project import ROOT


def problems(extra, **train):
    raw = yaml.safe_load((ROOT / "config" / "ci.yaml").read_text(encoding="utf-8"))
    del raw["experiments"]
    raw["train"] |= {"extra": extra, **train}
    return list(options.problems(Config.model_validate(raw)))


def test_what_verl_knows_and_pat_leaves_to_the_user_passes():
    assert not problems(
        {
            "actor_rollout_ref.actor.optim.weight_decay": "1e-2",
            "trainer.save_freq": 100,
            "trainer.default_local_dir": "/scratch/weights",
            "reward.custom_reward_function.path": "/mine.py",
            "+my.own": "word",
            "data.shuffle": True,
        }
    )


REFUSED_BY_VERL = {
    "trainer.foo": (1, "Could not override 'trainer.foo'"),
    "actor_rollout_ref.actor.optm.lr": (1.0, "did you mean actor_rollout_ref.actor.optim.lr?"),
    "a b": (1, "override_grammar"),
}
REFUSED_BY_PAT = {
    "+trainer": ({"logger": ["console"]}, "loggers are console and file"),
    "actor_rollout_ref.rollout.n": (8, "set rollout.samples"),
    "data.train_batch_size": (2, "set rollout.prompts"),
    "trainer.nnodes": (2, "set train.nodes"),
    "trainer.test_freq": (1, "responses of a validation"),
    "actor_rollout_ref.model.lora_rank": (8, "adapters are sharded"),
    "trainer.v1.trainer_mode": ("colocate_async", "'sync' (PAT is for synchronous training"),
    "actor_rollout_ref.rollout.mode": ("sync", "serves requests in this mode only"),
    "actor_rollout_ref.rollout.multi_turn.enable": (True, "an iteration would have other responses"),
    "actor_rollout_ref.rollout.top_k": (1, "teach nothing"),
    "+actor_rollout_ref.rollout.engine_kwargs.sglang.page_size": (16, "KV moves by the token"),
    "+actor_rollout_ref.rollout.engine_kwargs.sglang.page_sze": (1, "did you mean page_size?"),
    "+actor_rollout_ref.rollout.custom.pat.margn": (1, "a setting of PAT (Extra inputs are not permitted)"),
}


def test_each_mistake_names_its_key_and_what_is_allowed_and_all_are_told_at_once():
    wrong = REFUSED_BY_VERL | REFUSED_BY_PAT
    found = problems({key: value for key, (value, _) in wrong.items()})
    told = {key: allowed for key, _, allowed in found}
    assert told.keys() == wrong.keys()
    assert len(found) == len(wrong)
    for key, (_, allowed) in wrong.items():
        assert allowed in told[key], key


def test_a_logger_that_is_taken_away_is_missed():
    ((key, _, allowed),) = problems({"~trainer.logger": ["console", "file"]})
    assert key == "~trainer.logger"
    assert "loggers are console and file" in allowed


def test_with_checkpoints_their_folder_is_pats():
    ((key, _, allowed),) = problems({"trainer.default_local_dir": "/scratch"}, save_every=1)
    assert key == "trainer.default_local_dir"
    assert "leave out train.save_every" in allowed


def test_what_is_refused_is_in_verls_configuration_and_its_default_is_allowed():
    told, reason = options._compose(options.defaults(), {f"{options.ROLLOUT}.name": "pat"})
    assert not reason
    for key, (allowed, _) in options.REFUSED.items():
        assert key in set(options._keys(told)), key
        assert options._at(told, key) == allowed, key


def test_nothing_heavy_is_imported():
    code = "import sys; from tests.rl.test_options import problems; assert problems({'trainer.foo': 1}); "
    code += "print([name for name in ('torch', 'verl', 'sglang', 'ray', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
