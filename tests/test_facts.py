import json

import pytest

import pat.report
from pat.facts import collect, flatten, stage_files
from tests.synthetic import GENERATION, write_experiment


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    directory = write_experiment(tmp_path_factory.mktemp("results") / "tiny", switches=2)
    pat.report.run(directory, "tiny", directory / "report")
    return directory


def measured(experiment, stage):
    return {(name, step): value for name, value, step in collect(experiment, stage).metrics}


def test_every_iteration_of_an_arm_is_measured(experiment):
    metrics = measured(experiment, "train-pat")
    for iteration, seconds in enumerate(GENERATION["pat"], start=1):
        assert metrics["gen/seconds", iteration] == seconds
        assert metrics["iteration/seconds", iteration] == seconds + 20 + iteration
        assert metrics["reward/mean", iteration] == 0.5 + 0.01 * iteration
        assert metrics["switch/count", iteration] == 2
        assert metrics["switch/seconds", iteration] == 1.0
        assert metrics["switch/predicted_saving_s", iteration] == 5 + 6
        assert metrics["switch/realised_saving_s", iteration] == 4 + 5
    assert metrics["summary/gen_s", 0] == 39.5


def test_what_an_arm_does_not_have_is_not_measured(experiment):
    names = {name for name, _ in measured(experiment, "train-tp1")}
    assert "switch/count" in names
    assert not names & {"switch/realised_saving_s", "iteration/old_log_prob_s", "summary/old_log_prob_s"}


def test_an_arm_says_which_code_and_data_it_used(experiment):
    facts = collect(experiment, "train-tp2")
    assert facts.tags["pat.arm"] == "tp2"
    assert facts.tags["pat.git"].startswith("0123456")
    assert [(data.name, data.split, data.rows) for data in facts.data] == [
        ("gsm_symbolic", "train", 64),
        ("gsm_symbolic", "val", 8),
    ]
    assert facts.params["versions"]["verl"] == "0.9.1"


def test_the_report_is_an_overview_of_the_arms(experiment):
    metrics = measured(experiment, "report")
    assert metrics["gen_seconds/tp1", 0] == 53.5
    assert metrics["gain_gen_pct/over_best_static", 0] == pytest.approx(100 * 2 / 41.5)
    assert metrics["lengths/matched_share", 0] == 1
    assert ("gain_gen_pct/over_oracle", 0) not in metrics
    facts = collect(experiment, "report")
    assert facts.tags["pat.fastest"] == "pat"
    assert facts.remark.startswith("Generation takes 39.5 s with pat")


def test_profile_predictor_hardware_and_assets(experiment):
    profile = measured(experiment, "profile")
    assert profile["decode/ms_by_batch_tp1", 8] == pytest.approx(140)
    assert profile["profile/decode_rows", 0] == 8
    assert measured(experiment, "predictor")["switch/median_abs_pct_tp1_to_2", 0] == 10
    assert measured(experiment, "hardware")["hardware/memory_gib", 0] == 24
    assert measured(experiment, "assets")["data/train_rows", 0] == 64
    assert collect(experiment, "assets").params["checkpoint"]["num_hidden_layers"] == 30


def test_files_are_those_of_the_stage_with_its_config_and_log(experiment):
    for name in (
        "config/train-tp1.json",
        "logs/train-tp1.log",
        "benchmarks/train-tp1.tsv",
        "config/report.json",
    ):
        (experiment / name).parent.mkdir(exist_ok=True)
        (experiment / name).write_text("{}")
    (experiment / "train" / "tp1" / "weights.safetensors").write_text("large")
    found = {path.relative_to(experiment).as_posix() for path in stage_files(experiment, "train-tp1")}
    assert found == {
        *(f"train/tp1/{name}.parquet" for name in ("iterations", "requests", "switches")),
        *("train/tp1/run.json", "train/tp1/log.txt"),
        *("config/train-tp1.json", "logs/train-tp1.log", "benchmarks/train-tp1.tsv"),
    }


def test_the_benchmark_tells_seconds_and_memory(experiment):
    path = experiment / "benchmarks" / "train-pat.tsv"
    path.parent.mkdir(exist_ok=True)
    path.write_text("s\th:m:s\tmax_rss\n312.5\t0:05:12\t-\n")
    metrics = measured(experiment, "train-pat")
    assert metrics["stage/seconds", 0] == 312.5
    assert ("stage/max_rss_mib", 0) not in metrics


@pytest.mark.parametrize("stage", ["training", "train", "report-pat", ""])
def test_an_unknown_stage_is_refused(experiment, stage):
    with pytest.raises(ValueError, match="the stages are hardware"):
        stage_files(experiment, stage)


def test_a_simulation_tells_times_and_regret(tmp_path):
    (tmp_path / "simulate").mkdir()
    summary = {
        "arms": {"tp1": {"gen_s": 3.0, "switches": 0.0}, "pat": {"gen_s": 2.0, "switches": 1.5}},
        "regret_pct": {"tp1": 60.0, "pat": 1.5},
        "gain_pct": {"default": 33.0, "oracle": -1.5},
        "stage": {"nodes": 128},
    }
    (tmp_path / "simulate" / "summary.json").write_text(json.dumps(summary))
    metrics = measured(tmp_path, "simulate")
    assert metrics["simulated_gen_seconds/tp1", 0] == 3.0
    assert metrics["simulated_switches/pat", 0] == 1.5
    assert metrics["regret_to_oracle_pct/pat", 0] == 1.5
    assert metrics["simulated_gain_pct/over_oracle", 0] == -1.5
    assert collect(tmp_path, "simulate").params == {"stage": {"nodes": 128}}


def test_an_unfinished_stage_is_told_by_its_missing_file(experiment):
    with pytest.raises(FileNotFoundError, match=r"train/tp8/iterations\.parquet is missing"):
        stage_files(experiment, "train-tp8")


def test_settings_are_flattened():
    nested = {
        "train": {"lr": 1e-6, "extra": {}},
        "arms": ["tp1", "pat"],
        "seed": None,
        "model": {"source": "x"},
    }
    assert dict(flatten(nested)) == {
        "train.lr": "1e-06",
        "train.extra": "{}",
        "arms": json.dumps(["tp1", "pat"]),
        "seed": "null",
        "model.source": "x",
    }
