"""Where a training begins: at its last checkpoint whose iterations are all recorded, if it is the same training."""

import os
from pathlib import Path

import pytest
import yaml

from pat.config import Config, stage_config
from pat.rl import collect, resume
from pat.rl.resume import Start
from tests.rl.recording import METRICS, generation, request, write

PROJECT = Path(__file__).parents[2]
ARM = "pat"


def config(**changes):
    """What stage train-pat reads of config/ci.yaml, with 8 iterations and a checkpoint every 2."""
    raw = yaml.safe_load((PROJECT / "config" / "ci.yaml").read_text())
    del raw["experiments"]
    raw["train"] |= {"iterations": 8, "save_every": 2}
    for section, values in changes.items():
        raw[section] = raw.get(section, {}) | values if isinstance(values, dict) else values
    return stage_config(Config.model_validate(raw), f"train-{ARM}")


@pytest.fixture
def experiment(tmp_path):
    for name in ("model/config.json", "data/train.parquet", "predictor/model.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("as it was")
    return tmp_path


def begin(experiment, cfg=None) -> Start:
    return resume.prepare(cfg or config(), experiment, ARM, experiment / "train" / ARM)


def make(experiment, generations, metrics, checkpoints=(), complete=None, servers=1):
    """Leave what a training that was interrupted leaves: so many iterations' records, and checkpoints."""
    out, folder = experiment / "train" / ARM, resume.folder(experiment, ARM)
    requests = [request(1, 0.0, 1.0, 2)]
    records = [generation(n, requests, replica=r) for n in range(1, generations + 1) for r in range(servers)]
    write(out, records, [METRICS] * metrics)
    for step in checkpoints:
        (folder / f"global_step_{step}" / "actor").mkdir(parents=True)
    if checkpoints:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(complete or max(checkpoints)))
    return out, folder


def at(experiment, done, *starts) -> Start:
    return Start(done, resume.folder(experiment, ARM) / f"global_step_{done}", starts)


def records(out) -> list[str]:
    return sorted(file.name for file in (out / "rollout").iterdir())


def test_the_first_time_it_begins_at_the_beginning(experiment):
    assert begin(experiment) == Start(0, None, (0,))
    assert (experiment / "train" / ARM).is_dir()


def test_it_goes_on_from_the_last_checkpoint_and_forgets_what_came_after(experiment):
    begin(experiment)
    out, folder = make(experiment, generations=6, metrics=5, checkpoints=(2, 4))
    assert begin(experiment) == at(experiment, 4, 0, 4)
    assert [line["step"] for line in collect.verl_lines(out)] == [1, 2, 3, 4]
    assert not (out / "verl.jsonl").exists()  # verl will write it anew
    assert records(out) == [f"{n:06d}-000.json" for n in range(1, 5)]
    assert sorted(path.name for path in folder.glob("global_step_*")) == ["global_step_4"]


def test_a_checkpoint_whose_iteration_has_no_metrics_yet_is_not_used(experiment):
    """verl writes the metrics of an iteration after its checkpoint."""
    begin(experiment)
    make(experiment, generations=4, metrics=3, checkpoints=(2, 4))
    assert begin(experiment) == at(experiment, 2, 0, 2)


def test_a_checkpoint_that_is_not_complete_is_not_used(experiment):
    begin(experiment)
    make(experiment, generations=5, metrics=5, checkpoints=(2, 4), complete=2)
    assert begin(experiment) == at(experiment, 2, 0, 2)


def test_a_record_that_one_server_did_not_write_is_missed(experiment):
    cfg = config(train={"iterations": 8, "save_every": 2, "nodes": 2, "lr": 1e-3})
    begin(experiment, cfg)
    out, _ = make(experiment, generations=4, metrics=4, checkpoints=(2, 4), servers=2)
    (out / "rollout" / "000003-001.json").unlink()
    assert begin(experiment, cfg) == at(experiment, 2, 0, 2)


def test_without_a_checkpoint_it_begins_again(experiment):
    begin(experiment)
    out, _ = make(experiment, generations=1, metrics=1)
    assert begin(experiment) == Start(0, None, (0,))
    assert not (out / "rollout").exists()


def test_interrupted_again_and_again_it_knows_each_start_once(experiment):
    begin(experiment)
    out, _ = make(experiment, generations=3, metrics=2, checkpoints=(2,))
    for _ in range(2):  # the second time it came no further
        assert begin(experiment) == at(experiment, 2, 0, 2)
    for n in (3, 4, 5):
        write(out, [generation(n, [request(1, 0.0, 1.0, 2)])])
    (out / "verl.jsonl").write_text("".join(f'{{"step": {n}, "data": {{}}}}\n' for n in (3, 4)))
    folder = resume.folder(experiment, ARM)
    (folder / "global_step_4" / "actor").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    assert begin(experiment) == at(experiment, 4, 0, 2, 4)
    assert [line["step"] for line in collect.verl_lines(out)] == [1, 2, 3, 4]


def test_a_training_that_has_made_all_iterations_has_nothing_left_to_do(experiment):
    begin(experiment)
    out, _ = make(experiment, generations=8, metrics=8, checkpoints=(6, 8))
    assert begin(experiment) == Start(8, None, (0,))
    assert len(records(out)) == len(collect.verl_lines(out)) == 8


@pytest.mark.parametrize(
    "changes",
    [
        *({"seed": 5}, {"train": {"iterations": 9, "save_every": 2}}, {"policy": {"margin": 0.5}}),
        {"rollout": {"temperature": 0.5}},
    ],
    ids=str,
)
def test_other_settings_begin_again_and_remove_the_old_checkpoints(experiment, changes):
    begin(experiment)
    _, folder = make(experiment, generations=4, metrics=4, checkpoints=(2, 4))
    assert begin(experiment, config(**changes)) == Start(0, None, (0,))
    assert not list(folder.glob("global_step_*"))
    assert begin(experiment) == Start(0, None, (0,))  # nor do they come back


@pytest.mark.parametrize("name", ["model/config.json", "data/train.parquet", "predictor/model.json"])
def test_another_model_data_or_predictor_begins_again(experiment, name):
    begin(experiment)
    make(experiment, generations=4, metrics=4, checkpoints=(2, 4))
    os.utime(experiment / name, (1, 1))
    assert begin(experiment) == Start(0, None, (0,))


@pytest.mark.parametrize("what", ["code", "packages", "own"])
def test_other_code_packages_or_reward_begin_again(experiment, monkeypatch, what):
    reward = experiment / "reward.py"
    reward.write_text("def compute_score(**_):\n    return 1.0\n")
    train = {"iterations": 8, "save_every": 2, "extra": {"reward.custom_reward_function.path": str(reward)}}
    begin(experiment, config(train=train))
    make(experiment, generations=4, metrics=4, checkpoints=(2, 4))
    if what == "code":
        monkeypatch.setattr(resume.basis, "code_files", lambda stage: [])
    if what == "packages":
        monkeypatch.setattr(resume.basis, "installed", lambda names: {"sglang": "0.0.0"})
    if what == "own":
        reward.write_text("def compute_score(**_):\n    return 0.5\n")
        resume.digest.code.cache_clear()  # each start is a process of its own
    assert begin(experiment, config(train=train)) == Start(0, None, (0,))


def test_without_checkpoints_nothing_is_kept(experiment):
    off = config(train={"iterations": 8, "save_every": None})
    begin(experiment, off)
    make(experiment, generations=4, metrics=4, checkpoints=(2, 4))
    assert begin(experiment, off) == Start(0, None, (0,))
    assert not resume.folder(experiment, ARM).exists()


def test_a_finished_training_leaves_no_checkpoint_and_runs_again_from_the_beginning(experiment):
    begin(experiment)
    out, _ = make(experiment, generations=8, metrics=8, checkpoints=(6, 8))
    (out / "verl.jsonl").rename(out / "verl-before.jsonl")
    (out / "verl.jsonl").write_text('{"step": 9, "data": {}}\n')
    resume.finish(experiment, ARM, out)
    assert not (out / "verl-before.jsonl").exists()
    assert [line["step"] for line in collect.verl_lines(out)] == list(range(1, 10))
    assert not resume.folder(experiment, ARM).exists()
    assert begin(experiment) == Start(0, None, (0,))
