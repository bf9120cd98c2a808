"""The assets stage: a checkpoint that loads and prompts that fit."""

import json
from types import SimpleNamespace

import polars as pl
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from pat import assets
from pat.assets import data
from pat.assets.schema import COLUMNS
from pat.problems import ConfigError


def settings(source="tiny-llama", prompts="arithmetic", max_prompt=64, train_size=12):
    return SimpleNamespace(
        tp_sizes=(1, 2),
        seed=0,
        own_reward=False,
        model=SimpleNamespace(source=source, dtype="float32"),
        data=SimpleNamespace(source=prompts, train_size=train_size, val_size=4, seed=1),
        rollout=SimpleNamespace(prompts=4, max_prompt=max_prompt),
    )


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    assets.run(settings(), folder)
    return folder


def test_checkpoint_loads_and_says_what_was_padded(experiment):
    model = AutoModelForCausalLM.from_pretrained(experiment / "model")
    tokenizer = AutoTokenizer.from_pretrained(experiment / "model")
    facts = json.loads((experiment / "model" / "pat.json").read_text())
    assert facts["kv_heads"] == [3, 4]
    assert model.config.num_key_value_heads == 4
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    text = "12+34= ~\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == model.config.vocab_size


def test_data_is_in_verls_schema(experiment):
    train, val = (pl.read_parquet(experiment / "data" / f"{name}.parquet") for name in ("train", "val"))
    assert (train.height, val.height) == (12, 4)
    assert tuple(train.columns) == COLUMNS == tuple(val.columns)
    assert train["extra_info"].struct.field("index").to_list() == list(range(12))
    assert set(train["extra_info"].struct.field("split")) == {"train"}
    question, answer = train["prompt"][0][0]["content"], train["reward_model"][0]["ground_truth"]
    a, b = question.rstrip("=").split("+")
    assert int(a) + int(b) == int(answer)


def test_weights_follow_the_seed(experiment, tmp_path):
    first = AutoModelForCausalLM.from_pretrained(experiment / "model").lm_head.weight
    again, other = settings(), settings()
    other.seed = 1
    for name, cfg in (("again", again), ("other", other)):
        assets.run(cfg, tmp_path / name)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "model").lm_head.weight.equal(first)
    assert not AutoModelForCausalLM.from_pretrained(tmp_path / "other" / "model").lm_head.weight.equal(first)


def test_too_few_prompts_leave_earlier_results_alone(experiment):
    before = {path: path.stat().st_mtime_ns for path in experiment.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"data\.source: .* at most 3 tokens"):
        assets.run(settings(max_prompt=3), experiment)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_long_prompts_are_dropped_and_counted(capsys):
    lengths = iter([5, 50, 5, 5, 50, 5, 5, 5])
    frames = data.split("arithmetic", 6, 2, seed=0, length=lambda _: next(lengths), max_prompt=10)
    assert {name: frame.height for name, frame in frames.items()} == {"val": 2, "train": 4}
    assert "6 prompts, 2 dropped" in capsys.readouterr().out


def test_fewer_prompts_than_an_iteration_needs(tmp_path):
    with pytest.raises(ConfigError, match=r"at least rollout\.prompts = 4 prompts to train on; 3 are left"):
        assets.run(settings(train_size=3), tmp_path)


def test_gsm_symbolic_has_numbers_for_answers_and_no_prompt_twice():
    frames = data.split("gsm_symbolic", 20, 10, seed=3, length=len, max_prompt=1000)
    answers = frames["train"]["reward_model"].struct.field("ground_truth")
    assert answers.cast(pl.Float64).is_finite().all()
    questions = [row[-1]["content"] for frame in frames.values() for row in frame["prompt"].to_list()]
    assert len(set(questions)) == 30


def test_own_parquet_keeps_what_a_reward_may_want(tmp_path):
    path = tmp_path / "own.parquet"
    own = {"index": 70, "tests": ["assert f(1) == 2"], "level": 3}
    rows = [
        data._row("mine", [{"role": "user", "content": str(i)}], "1") | {"extra_info": own, "agent_name": "tool"}
        for i in range(4)
    ]
    pl.DataFrame(rows).write_parquet(path)
    train = data.split(str(path), 2, 2, seed=0, length=len, max_prompt=10)["train"]
    assert set(train["agent_name"]) == {"tool"}
    info = train["extra_info"].to_list()
    assert [row["index"] for row in info] == [0, 1]
    assert all((row["tests"], row["level"], row["split"]) == (own["tests"], 3, "train") for row in info)


def test_own_parquet_is_drawn_by_seed(tmp_path):
    path = tmp_path / "own.parquet"
    rows = [
        {**data._row("mine", [{"role": "user", "content": str(i)}], "1"), "extra_info": {"index": i}} for i in range(9)
    ]
    pl.DataFrame(rows).write_parquet(path)

    def questions(seed):
        frames = data.split(str(path), 5, 2, seed=seed, length=len, max_prompt=10)
        return [row[0]["content"] for frame in frames.values() for row in frame["prompt"].to_list()]

    assert questions(0) == questions(0) != questions(1)
    assert len(set(questions(0))) == 7
