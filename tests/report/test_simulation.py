import json

import pytest

from pat.report import published, simulation
from pat.report.experiment import load
from pat.report.figures_simulated import validated, validation
from tests.synthetic import write_experiment, write_simulated_only

LLAMA, QWEN, ITERATION = published.RESULTS


def beside(directory, seconds, **options):
    experiment = load(write_simulated_only(directory, seconds, **options))
    return simulation.beside_published(experiment, {})


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({"tp1": 300, "tp2": 150, "tp8": 98, "pat": 100}, ("33.3 % over static tp2: that", "takes 2.0 % more")),
        ({"tp1": 300, "tp2": 250, "tp8": 110, "pat": 100}, ("60.0 % over static tp2, which comes nearest: no static",
                                                            "9.1 % remain")),
        ({"tp1": 300, "tp2": 170, "tp8": 101, "pat": 100, "threshold-best": 110},
         ("41.2 % over static tp2, and a single switch", "35.3 % over static tp2: that reproduces", "next to nothing")),
        ({"tp1": 152, "tp8": 100.5, "pat": 100}, ("34.2 % over static tp1: that baseline", "next to nothing remains")),
    ],
)  # fmt: skip
def test_which_baseline_reproduces_the_published_gain_and_what_remains(tmp_path, seconds, words):
    (sentence,) = simulation.published_sentences(beside(tmp_path, seconds))
    assert sentence.startswith("PAT's authors report 34.6 % less generation time than verl for Llama-3.1-8B on 8 H100")
    for part in words:
        assert part in sentence


def test_a_published_gain_is_only_claimed_for_its_model_and_kind_of_machine(tmp_path):
    seconds = {"tp1": 152, "tp8": 101, "pat": 100}
    assert simulation.published_sentences(beside(tmp_path, seconds, system="l40s")) == []
    assert published.applies(LLAMA, "meta-llama/Llama-3.1-8B-Instruct", "h100_sxm")
    assert not published.applies(QWEN, "Llama-3.1-8B", "h100_sxm")
    assert not published.applies(ITERATION, "the best case", "h100_sxm")


def test_measured_arms_stand_beside_them_too_generation_and_iteration(tmp_path):
    experiment = load(write_experiment(tmp_path))
    arms = {"tp1": {"gen_s": 100.0, "iteration_s": 200.0}, "tp2": {"gen_s": 80.0, "iteration_s": 160.0},
            "pat": {"gen_s": 70.0, "iteration_s": 150.0}}  # fmt: skip
    rows = {row["result"]: row for row in simulation.beside_published(experiment, arms)}
    assert rows[LLAMA]["simulated"] is None
    assert rows[LLAMA]["measured"]["nearest"] == "tp1"
    assert rows[LLAMA]["measured"]["gain"] == pytest.approx(30)
    assert rows[LLAMA]["measured"]["remains"] == pytest.approx(12.5)
    assert (rows[ITERATION]["measured"]["nearest"], rows[ITERATION]["measured"]["reproduced"]) == ("tp1", True)


def test_arms_are_named_for_a_reader():
    assert simulation.label("pat-tp2-latency-x0.8") == "tp2 taken for 0.8 times as slow"
    assert simulation.label("pat-recompute-only") == "KV cache: recompute only"
    assert simulation.label("threshold", {"threshold": 16}) == "threshold at 16 unfinished"
    assert simulation.label("threshold-best", {"threshold-best": 8}).endswith("chosen in hindsight")
    assert simulation.label("pat-of-tomorrow") == "pat-of-tomorrow"


def test_policies_come_in_the_order_of_the_report():
    arms = dict.fromkeys(("oracle", "pat", "pat-one-switch", "tp16", "tp2", "threshold"))
    assert simulation.policies(arms) == ["tp2", "tp16", "threshold", "pat", "oracle"]
    assert simulation.ablations(arms) == ["pat-one-switch"]


def test_simulated_and_real_rollouts_are_held_against_each_other():
    arms = {"tp1": {"gen_s": [9.0, 10.0, 12.0], "median": 10.0}, "tp2": {"gen_s": [5.0], "median": 5.0}}
    rollouts = {"workloads": {"a": {"arms": arms, "predicted_s": {"tp1": 11.0}}, "b": {"arms": arms}}}
    (row,) = validated(rollouts)
    assert (row["workload"], row["arm"], row["low"], row["high"]) == ("a", "tp1", 9.0, 12.0)
    assert row["error_pct"] == pytest.approx(10)
    assert validation(rollouts) is not None
    assert validation({"workloads": {"b": {"arms": arms}}}) is None


def test_a_report_takes_the_rollouts_that_lie_beside_it(tmp_path):
    directory = write_experiment(tmp_path / "name")
    assert load(directory).rollouts is None
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "rollout.json").write_text(json.dumps({"workloads": {}}))
    assert load(directory).rollouts == {"workloads": {}}
