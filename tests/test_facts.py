import json

import polars as pl
import pytest

import pat.report
from pat import usage
from pat.facts import collect, flatten, stage_files
from pat.report.style import arm_colours
from tests.synthetic import GENERATION, write_experiment, write_simulated_only


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    directory = write_experiment(tmp_path_factory.mktemp("results") / "tiny", switches=2)
    pat.report.run(directory, "tiny", directory / "report")
    return directory


def measured(experiment, stage):
    return {(each.name, each.step): each.value for each in collect(experiment, stage).metrics}


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
    assert metrics["gen/median_seconds", 0] == 39.5


def test_verls_own_metrics_are_there_under_its_sections(experiment):
    metrics = measured(experiment, "train-pat")
    assert [metrics["verl/actor/pg_loss", n] for n in (1, 2, 3)] == [0.02, 0.04, 0.06]
    assert metrics["verl/actor/grad_norm", 3] == 1.5
    assert metrics["verl/val-core/gsm/acc/mean_1", 2] == 0.5  # trackers forbid @
    names = {name for name, _ in metrics}
    assert {"verl/actor/ppo_kl", "verl/actor/lr", "verl/critic/rewards/mean"} <= names
    assert not names & {
        "verl/actor/entropy",
        "verl/training/global_step",
        "verl/timing_s/gen",
    }  # no number, and what PAT tells


def test_what_an_arm_does_not_have_is_not_measured(experiment):
    names = {name for name, _ in measured(experiment, "train-tp1")}
    assert "switch/count" in names
    assert not names & {"switch/realised_saving_s", "iteration/old_log_prob_s"}


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
    assert metrics["overview/gen_seconds.tp1", 0] == 53.5
    assert metrics["overview/pat_saves_gen_pct.over_best_static", 0] == pytest.approx(100 * 2 / 41.5)
    assert metrics["overview/matched_lengths_share", 0] == 1
    assert ("overview/pat_saves_gen_pct.over_oracle", 0) not in metrics
    facts = collect(experiment, "report")
    assert facts.tags["pat.fastest"] == "pat"
    # pat is fastest in the median, but not in the third iteration
    assert facts.name == "overview: not settled, pat or tp2"
    assert facts.remark.startswith("**not settled, pat or tp2**\n\nGeneration takes 39.5 s with pat")
    assert facts.image == experiment / "report" / "headline.png"
    rows = [line for line in facts.note.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows] == ["Arm, medians", "---", "tp1", "tp2", "**pat**"]
    assert "| tp2 | 41.5 |" in facts.note


def test_the_overview_of_a_simulation(tmp_path):
    directory = write_simulated_only(tmp_path / "h100", {"tp1": 200.0, "tp8": 110.0, "pat": 100.0})
    pat.report.run(directory, "On paper", directory / "report")
    metrics = measured(directory, "report")
    assert metrics["overview/simulated_gen_seconds.tp8", 0] == pytest.approx(111.1)
    facts = collect(directory, "report")
    assert facts.name == "overview: pat fastest, 9.1 % ahead of tp8"
    assert facts.params["references"]["best_static"] == "tp8"
    assert "+50.0 % over the default" in facts.note


def test_profile_predictor_hardware_and_assets(experiment):
    assert measured(experiment, "profile")["profile/decode_ms_by_batch.tp1", 8] == pytest.approx(140)
    assert collect(experiment, "profile").params["profile_rows"]["decode"] == 8
    assert measured(experiment, "predictor")["predictor/switch_median_abs_pct.tp1_to_2", 0] == 10
    assert collect(experiment, "hardware").params["hardware"]["memory_gib"] == 24
    assets = collect(experiment, "assets").params
    assert assets["data"] == {"train_rows": 64, "val_rows": 8}
    assert assets["checkpoint"]["num_hidden_layers"] == 30
    assert collect(experiment, "train-tp1").params["checkpoint"] == assets["checkpoint"]


def test_the_slurm_job_of_a_stage_is_told(experiment):
    (experiment / "jobs").mkdir()
    (experiment / "jobs" / "predictor.json").write_text(json.dumps({"slurm_job_id": 1234, "node": "gpu07"}))
    assert collect(experiment, "predictor").tags == {"pat.slurm_job_id": "1234", "pat.node": "gpu07"}
    assert "pat.slurm_job_id" not in collect(experiment, "profile").tags


def test_an_arm_has_the_colour_that_it_has_in_the_report(experiment):
    colours = {arm: collect(experiment, f"train-{arm}").colour for arm in GENERATION}
    assert colours == arm_colours(list(GENERATION))


def test_what_the_machine_did_is_told_under_the_names_that_mlflow_knows(experiment):
    gpu = {"gpu": 1, "use_pct": 90.0, "memory_mb": 4000.0, "power_w": 360.0}
    sample = {"cpu_pct": 50.0, "memory_mb": 8000.0, "memory_pct": 33.0, "gpus": [gpu]}
    path = experiment / "train" / "pat" / "usage.parquet"
    seconds = [100.0 + 10 * i for i in range(1000)]
    pl.DataFrame([sample | {"time_s": at} for at in seconds], schema=usage.SCHEMA).write_parquet(path)
    facts = collect(experiment, "train-pat")
    path.unlink()
    cpu = [each for each in facts.metrics if each.name == "system/cpu_utilization_percentage"]
    assert len(cpu) == 334  # every third: at most 400
    assert [(each.step, each.time_ms) for each in cpu[:2]] == [(0, 100_000), (1, 130_000)]
    last = {each.name: each.value for each in facts.metrics}
    assert last["system/gpu_1_power_usage_watts"] == 360
    assert last["stage/gpu_energy_wh"] == pytest.approx(999.0)


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
        *("train/tp1/run.json", "train/tp1/log.txt", "train/tp1/verl.jsonl"),
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
    assert metrics["simulate/gen_seconds.tp1", 0] == 3.0
    assert metrics["simulate/switches.pat", 0] == 1.5
    assert metrics["simulate/longer_than_oracle_pct.pat", 0] == 1.5
    assert metrics["simulate/pat_saves_pct.over_oracle", 0] == -1.5
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
