"""Stage train seen from outside: a small script stands for verl, and does what verl might do."""

import json
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml

from pat.config import Config, stage_config
from pat.rl import train
from pat.rl.iteration import COUNTED
from pat.rl.train import Progress, TrainingFailed
from tests.rl.endings import DEADLINE_S, gone
from tests.rl.recording import METRICS, generation, request, switch, write

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def cfg():
    """tp1 of config/ci.yaml with two iterations of two prompts x two samples."""
    raw = yaml.safe_load((PROJECT / "config" / "ci.yaml").read_text())
    del raw["experiments"]
    raw["rollout"] |= {"prompts": 2, "samples": 2, "deadline_s": 1.0}
    raw["train"] |= {"iterations": 2}
    return stage_config(Config.model_validate(raw), "train-tp1")


@pytest.fixture
def run(cfg, tmp_path, monkeypatch):
    """run(script): stage train with a shell script in verl's place; $1 is the arm's folder, $2 Ray's."""
    monkeypatch.setattr(train, "POLL_S", 0.02)
    monkeypatch.setattr(train, "START_S", DEADLINE_S)
    monkeypatch.setattr(train.provenance, "facts", dict)
    monkeypatch.setattr(
        train.job, "overrides", lambda cfg, experiment, arm, out, ray, *rest: {"out": out, "ray": ray["_temp_dir"]}
    )

    def start(script, start_s=DEADLINE_S, cfg=cfg):
        monkeypatch.setattr(train, "START_S", start_s)
        wanted = ("out", "ray") if "$2" in script else ("out",)  # a name of Ray's folder would give it away
        command = ["sh", "-c", script, "sh"]
        monkeypatch.setattr(train.job, "command", lambda values: command + [str(values[key]) for key in wanted])
        train.run(cfg, tmp_path, "tp1")

    return start


def test_ray_has_a_token_of_this_training_alone(run, tmp_path, monkeypatch):
    """By itself Ray keeps one in the user's home, for all trainings, and fails where that cannot be written to."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another's, which Ray would prefer")
    told = tmp_path / "told"
    script = (
        f'echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN $(wc -c < $RAY_AUTH_TOKEN_PATH) $RAY_AUTH_TOKEN_PATH" > {told}; exit 3'
    )
    failure(run, script)
    mode, length, path = told.read_text(encoding="utf-8").split()
    assert (mode, length) == ("token", "64")
    assert not Path(path).exists()


def failure(run, script, **options) -> str:
    with pytest.raises(TrainingFailed) as caught:
        run(script, **options)
    return str(caught.value)


def recorded(folder):
    """What a good run leaves behind, for a script to copy."""
    requests = [request(i, 10.0, 11.0 + i, 5) for i in range(4)]
    write(folder, [generation(n, requests) for n in (1, 2)], [METRICS] * 2)
    return folder


# --- how a run ends ---------------------------------------------------------------------------
def test_a_job_that_fails_is_explained_by_its_log(run, tmp_path):
    text = failure(run, "echo chatter; echo 'ValueError: too few prompts'; exit 3")
    assert "tp1: verl ended with status 3" in text
    assert "ValueError: too few prompts" in text
    assert "chatter" not in text
    assert text.endswith(f"The whole log: {tmp_path / 'train' / 'tp1' / 'log.txt'}")


def test_a_job_that_was_killed_tells_the_signal(run):
    assert "verl ended with status -9" in failure(run, "kill -9 $$")


def test_a_job_that_ends_early_says_how_far_it_came(run, tmp_path):
    assert "tp1: 0 of 2 iterations were run" in failure(run, "exit 0")
    write(tmp_path / "one", metrics=[METRICS])
    assert "tp1: 1 of 2 iterations were run" in failure(run, f"cp {tmp_path}/one/verl.jsonl $1")


def test_a_job_that_hangs_is_ended_with_all_that_it_started(run, tmp_path):
    text = failure(run, "sleep 600 & echo $! $$ > $1/pids; echo waiting; wait", start_s=1.0)
    assert "tp1: nothing has moved for 2 s" in text
    assert "waiting" in text
    pids = [int(pid) for pid in (tmp_path / "train" / "tp1" / "pids").read_text().split()]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_what_ray_has_left_running_is_ended_and_its_folder_removed(run, tmp_path):
    sleeper = f"{sys.executable} -c 'import time; time.sleep(600)' $2/session"  # names its folder, as Ray's do
    failure(run, f"setsid {sleeper} & echo $! $2 > $1/left; exit 1")
    pid, ray_folder = (tmp_path / "train" / "tp1" / "left").read_text().split()
    assert gone(int(pid))
    assert not Path(ray_folder).exists()


def test_a_good_run_leaves_tables_and_says_what_it_was(run, cfg, tmp_path, capsys):
    good = recorded(tmp_path / "good")
    run(f"cp -r {good}/* $1; mkdir $1/hydra; echo fine")
    out = tmp_path / "train" / "tp1"
    tables = {f"{name}.parquet" for name in ("iterations", "requests", "switches", "decode")}
    assert {file.name for file in out.iterdir()} == {*tables, "run.json", "log.txt", "verl.jsonl", "usage.parquet"}
    about = json.loads((out / "run.json").read_text())
    assert about["arm"] == "tp1"
    assert about["config"] == cfg.model_dump(mode="json")
    assert about["seconds"] > 0
    assert (out / "log.txt").read_text() == "fine\n"
    assert f"log: {out / 'log.txt'}" in capsys.readouterr().out


def test_results_of_an_earlier_run_are_not_mixed_in(run, tmp_path):
    stale = tmp_path / "train" / "tp1" / "rollout"
    recorded(stale.parent)
    assert "0 of 2 iterations were run" in failure(run, "exit 0")
    assert not stale.exists()


# --- going on from a checkpoint -----------------------------------------------------------------
@pytest.fixture
def saving(cfg):
    return cfg.model_copy(update={"train": cfg.train.model_copy(update={"save_every": 1})})


def interrupted(tmp_path):
    """A script that has a checkpoint and the records of iteration 1 when it is killed, and half of iteration 2."""
    recorded(tmp_path / "good")
    write(tmp_path / "one", [generation(1, [request(i, 10.0, 11.0 + i, 5) for i in range(4)])], [METRICS])
    checkpoints = tmp_path / "checkpoints" / "tp1"
    return (
        f"cp -r {tmp_path}/one/* $1; cp {tmp_path}/good/rollout/000002* $1/rollout;"
        f"cd {checkpoints}; mkdir -p global_step_1/actor; printf 1 > latest_checkpointed_iteration.txt; kill -9 $$"
    )


def test_a_killed_training_goes_on_and_counts_each_iteration_once(run, saving, tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(train.job, "overrides", lambda *arguments: asked.append(arguments[-1]) or {"out": arguments[3]})
    assert "verl ended with status -9" in failure(run, interrupted(tmp_path), cfg=saving)
    capsys.readouterr()
    second = json.dumps({"step": 2, "data": METRICS | {"critic/rewards/mean": 0.75, COUNTED: 4}})
    run(
        f"ls $1/rollout > $1/found; cp {tmp_path}/good/rollout/000002* $1/rollout; echo '{second}' > $1/verl.jsonl",
        cfg=saving,
    )
    out, checkpoints = tmp_path / "train" / "tp1", tmp_path / "checkpoints" / "tp1"
    assert asked == [None, checkpoints / "global_step_1"]
    assert (out / "found").read_text() == "000001-000.json\n"  # the half of iteration 2 is gone
    table = pl.read_parquet(out / "iterations.parquet")
    assert table.select("iteration", "reward_mean", "warm_up").rows() == [(1, 0.25, True), (2, 0.75, True)]
    assert json.loads((out / "run.json").read_text())["starts"] == [0, 1]
    assert not checkpoints.exists()
    told = capsys.readouterr().out
    assert "tp1: 1 of 2 iterations are there already" in told
    assert "tp1 [2/2]" in told
    assert "tp1 [1/2]" not in told


def test_a_training_that_had_only_its_tables_to_write_does_not_start_verl(run, saving, tmp_path):
    good = recorded(tmp_path / "good")
    failure(run, f"cp -r {good}/* $1; exit 1", cfg=saving)
    run("touch $1/verl-was-started", cfg=saving)
    assert pl.read_parquet(tmp_path / "train" / "tp1" / "iterations.parquet").height == 2
    assert not (tmp_path / "train" / "tp1" / "verl-was-started").exists()


# --- progress ---------------------------------------------------------------------------------
@pytest.fixture
def clock(monkeypatch):
    """clock[0] is what the clock says, seconds."""
    now = [1000.0]
    monkeypatch.setattr(train, "time", type("Time", (), {"monotonic": staticmethod(lambda: now[0])}))
    return now


def shown(progress, capsys) -> list[str]:
    progress.show()
    return capsys.readouterr().out.splitlines()


def test_each_generation_and_iteration_is_told_once_with_what_is_left(tmp_path, clock, capsys):
    progress = Progress("pat", 3, tmp_path)
    assert shown(progress, capsys) == []
    one = generation(1, [request(1, 5.0, 9.0, 40)], [switch(6.0, unfinished=1)])
    write(tmp_path, [one])
    (line,) = shown(progress, capsys)
    assert line.startswith("pat [1/3] generated 40 tokens in 4.0 s, 1 responses; tp1 -> tp2")
    told = []
    for done, now in ((1, 1600.0), (2, 1900.0), (3, 2200.0)):
        clock[0] = now
        write(tmp_path, metrics=[METRICS] * done)
        told += shown(progress, capsys)
    assert [line.split(" took ")[0] for line in told] == ["pat [1/3]", "pat [2/3]", "pat [3/3]"]
    assert all("took 9.0 s (generation 4.0 s), mean reward 0.250" in line for line in told)
    # The first took 10 min with the start, the second 5.
    assert told[0].endswith("about 20.0 min left in this arm")
    assert told[1].endswith("about 5.0 min left in this arm")
    assert told[2].endswith(", done")
    assert progress.done == 3
    assert shown(progress, capsys) == []


def test_only_news_counts_as_movement(tmp_path, clock):
    progress = Progress("tp1", 2, tmp_path)
    clock[0] += 50
    progress.show()
    assert progress.still_s == 50
    write(tmp_path, metrics=[METRICS])
    progress.show()
    assert progress.still_s == 0
    clock[0] += 7
    progress.show()
    assert progress.still_s == 7


def test_an_explanation_has_the_lines_that_matter_and_the_way_to_the_rest(tmp_path):
    log = tmp_path / "log.txt"
    log.write_bytes(b"starting\nRuntimeError: rank 1 \xff died\nshutting down\n")
    lines = train._explain("pat: verl ended with status 1", log).splitlines()
    assert lines[0].startswith("pat: verl ended with status 1")
    assert "RuntimeError: rank 1" in lines[1]
    assert lines[2:] == [f"The whole log: {log}"]
