"""A user's Parquet file: what cannot be trained on is told in one line, with column, row and what is allowed."""

import json

import polars as pl
import pytest

from pat import assets, configfile
from pat.assets import data, models, schema
from pat.problems import ConfigError
from tests.assets.test_assets import settings
from tests.workflow.project import ROOT

GOOD = {
    "data_source": "mine",
    "prompt": [{"role": "user", "content": "7+5="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "12"},
    "extra_info": {"level": 3},
}


@pytest.fixture
def write(tmp_path):
    """write({row: changes}, column=values): the path of a Parquet file of eight good rows but for these."""

    def make(rows=None, **columns):
        made = [GOOD | {"prompt": [{"role": "user", "content": f"{n}+5="}]} | (rows or {}).get(n, {}) for n in range(8)]
        frame = pl.DataFrame(made).with_columns(pl.Series(name, values) for name, values in columns.items())
        frame.write_parquet(tmp_path / "own.parquet")
        return str(tmp_path / "own.parquet")

    return make


def truth(value):
    return {"reward_model": {"style": "rule", "ground_truth": value}}


def message(**fields):
    return [{"role": "user", "content": "?"} | fields]


WHOLE = [  # a column of a wrong type
    ({"prompt": ["7+5="] * 8}, "column prompt is a list of {role, content}, both text: .*; it is text"),
    ({"prompt": [["7+5="]] * 8}, "column prompt .*; it is a list, of which each is text"),
    ({"prompt": [None] * 8}, "column prompt .*; it is null"),
    (
        {"prompt": [message(content=[{"type": "text", "text": "?"}])] * 8},
        "the content of its messages is a list.*: join",
    ),
    ({"prompt": [[{"from": "human", "content": "?"}]] * 8}, "column prompt .*; its messages have no role"),
    ({"prompt": [message(content=7)] * 8}, "column prompt .*; the content of its messages is int64"),
    ({"data_source": [7] * 8}, "column data_source is text, .*; it is int64"),
    ({"data_source": [None] * 8}, "column data_source is text, .*; it is null"),
    ({"extra_info": [json.dumps({"index": 1})] * 8}, "column extra_info is a struct .*, or null; it is text"),
    ({"extra_info": [["a"]] * 8}, "column extra_info is a struct .*; it is a list, of which each is text"),
    ({"reward_model": ['{"ground_truth": 7}'] * 8}, "column reward_model is {style, ground_truth}, .*; it is text"),
    ({"reward_model": [{"style": "rule"}] * 8}, "column reward_model .*; it has no ground_truth"),
    ({"reward_model": [truth(["12"])["reward_model"]] * 8}, "ground_truth is a list, of which each is text"),
    ({"reward_model": [truth(True)["reward_model"]] * 8}, "ground_truth is boolean"),
    ({"reward_model": [truth({"a": 1})["reward_model"]] * 8}, "ground_truth is a struct of a"),
    (
        {"reward_model": [truth(float(n) if n else float("nan"))["reward_model"] for n in range(8)]},
        "row 0 has .* not finite",
    ),
    ({"images": [["a.png"]] + [[]] * 7}, "column images is empty: the pat rollout generates text only; row 0 has some"),
]
ROWS = [  # some rows
    ({3: {"data_source": None}}, "column data_source is text; row 3 has null"),
    ({3: {"prompt": None}}, "column prompt is .*; row 3 has null"),
    ({3: {"prompt": []}, 5: {"prompt": []}}, "column prompt is .*; rows 3, 5 have no message"),
    ({6: {"prompt": message(content=None)}}, "column prompt is .*; row 6 has a null content"),
    ({6: {"prompt": message() + message(role=None)}}, "column prompt is .*; row 6 has a null role"),
    ({6: {"prompt": message(content=" \n")}}, "column prompt is .*; row 6 has no text in any message"),
    ({0: {"reward_model": None}}, "column reward_model is .*; row 0 has null"),
    ({2: truth(None)}, "column reward_model is .*, the truth a text or a number; row 2 has a null ground_truth"),
    ({2: truth("")}, "row 2 has an empty ground_truth"),
    ({2: truth(" ")}, "row 2 has an empty ground_truth"),
]
CASES = [((), columns, told) for columns, told in WHOLE] + [(rows, {}, told) for rows, told in ROWS]


@pytest.mark.parametrize(("rows", "columns", "told"), CASES)
def test_what_is_wrong_is_told_with_column_row_and_what_is_allowed(write, rows, columns, told):
    with pytest.raises(ValueError, match=f"^a Parquet file whose .*{told}") as caught:
        schema.read(write(dict(rows), **columns))
    assert "\n" not in str(caught.value)


def test_many_rows_are_counted(write):
    with pytest.raises(ValueError, match=r"rows 0, 1, 2, 3, 4, 5, 6, 7 have an empty ground_truth$"):
        schema.read(write({n: truth("") for n in range(8)}))
    assert schema.listed(list(range(12))) == "rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_a_reward_of_ones_own_may_take_any_truth(write):
    for value in (None, "", ["assert f(1) == 2"], {"tests": 3}, True):
        file = write(reward_model=[truth(value)["reward_model"]] * 8)
        assert schema.read(file, own_reward=True).height == 8
        assert data.split(file, 4, 2, 0, len, 9, own_reward=True)["train"].height == 4
    with pytest.raises(ValueError, match="row 3 has null"):
        schema.check(write({3: {"reward_model": None}}), own_reward=True)


def test_nothing_else_is_asked_of_a_file(write):
    rows = {1: {"extra_info": None}, 2: {"ability": None}, 3: {"prompt": message(content="") + message()}}
    system = {"prompt": [{"role": "system", "content": "Be brief."}, *message()]}
    file = write(rows | {4: system}, images=[[]] * 8, videos=[None] * 8, agent_name=["x"] * 8)
    assert schema.read(file).columns[-1] == "agent_name"


def test_the_configuration_is_refused_with_its_file(write, tmp_path):
    raw = (ROOT / "config" / "ci.yaml").read_text()
    file = write({3: truth(None)})
    config = tmp_path / "own.yaml"
    config.write_text(raw.replace("source: arithmetic", f"source: {file}"))
    with pytest.raises(
        ConfigError, match=r"data.source: got '.*own\.parquet'; allowed: .*row 3 has a null ground_truth"
    ):
        configfile.load(config)


# --- ground truths ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "texts"),
    [([7, 8], ["7", "8"]), ([0.5, 7.0], ["0.5", "7.0"]), (["yes", r"\frac{1}{2}"], ["yes", r"\frac{1}{2}"])],
)
def test_truths_become_text(write, values, texts):
    file = write(reward_model=[truth(values[n % 2])["reward_model"] for n in range(8)])
    frames = data.split(file, 6, 2, 0, len, 9)
    found = pl.concat(frames.values())["reward_model"].struct.field("ground_truth")
    assert sorted(found.unique()) == sorted(texts)


@pytest.mark.parametrize("bad", [r"\frac{1}{", "assert f(1) == 2", "we add 5 + 3 and get the sum", r"\boxed{}"])
def test_a_truth_that_nothing_could_meet_is_told_with_its_row(write, bad):
    file = write({5: truth(bad), 7: truth(bad)})
    with pytest.raises(
        ValueError, match="ground truths are numbers, words or expressions in LaTeX; rows 5, 7: "
    ) as told:
        data.split(file, 6, 2, 0, len, 9)
    assert repr(bad) in str(told.value)


# --- the chat template, by the tokenizer ---------------------------------------------------------------
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint whose chat template refuses the role system, as Gemma's does."""
    tokenizer = models.load_tokenizer("tiny-qwen3")
    tokenizer.chat_template = NO_SYSTEM + models.CHATML
    models.write("tiny-qwen3", "float32", (1,), 0, tmp_path / "checkpoint", tokenizer)
    return str(tmp_path / "checkpoint")


def test_a_template_that_refuses_a_role_is_told_with_the_row_before_the_model_is_loaded(
    write, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(models, "load_model", lambda *_: pytest.fail("loaded"))
    file = write({3: {"prompt": [{"role": "system", "content": "Be brief."}, *message()]}})
    told = r"data\.source: .* allowed: prompts that the chat template of model\.source takes; column prompt, row 3, "
    with pytest.raises(ConfigError, match=told + "of the roles system, user: TemplateError: System role not supported"):
        assets.run(settings(checkpoint, file, train_size=6), tmp_path / "out")


def test_our_own_prompts_fit_such_a_template(checkpoint):
    tokenizer = models.load_tokenizer(checkpoint)

    def length(messages):
        return len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))

    train = data.split("gsm_symbolic", 4, 2, 0, length, 4000)["train"]
    for messages in train["prompt"].to_list():
        assert [said["role"] for said in messages] == ["user"]
        assert messages[0]["content"].startswith(data.INSTRUCTION + "\n\n")


def test_a_prompt_of_ones_own_reaches_the_template_as_it_is(write, tmp_path):
    assets.run(settings("tiny-qwen3", write(), train_size=6), tmp_path / "out")
    train = pl.read_parquet(tmp_path / "out" / "data" / "train.parquet")
    assert {said[0]["content"] for said in train["prompt"].to_list()} <= {f"{n}+5=" for n in range(8)}
    assert "__row__" not in train.columns
