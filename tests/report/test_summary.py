import json
import math
from statistics import median

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat.report import setup
from pat.report.experiment import load
from pat.report.summary import kept_iterations, live_batch, live_switches, summarise, typical_iteration
from tests.synthetic import GENERATION, LENGTHS, write_experiment, write_simulation


@pytest.fixture
def summary(tmp_path):
    return summarise(load(write_experiment(tmp_path)))


def test_medians_leave_the_first_iteration_out(summary):
    for arm, seconds in GENERATION.items():
        kept = seconds[1:]
        numbers = summary["arms"][arm]
        assert numbers["gen_s"] == median(kept)
        assert numbers["iteration_s"] == median(s + 20 + i for i, s in enumerate(kept, start=2))
        assert numbers["tokens_per_s"] == pytest.approx(sum(LENGTHS) / median(kept))
        assert numbers["tail_share"] == pytest.approx(0.25)
        assert numbers["truncated_share"] == 3 / 16
        assert numbers["prob_diff_max"] == 4e-6
        assert numbers["iterations"] == 3
        assert summary["kept_iterations"][arm] == [2, 3, 4]
        assert summary["spread"][arm]["gen_s"] == [min(kept), max(kept)]


def test_a_phase_that_never_ran_is_null(summary):
    assert summary["arms"]["pat"]["old_log_prob_s"] is None
    assert summary["spread"]["pat"]["old_log_prob_s"] == [None, None]


def test_gains_are_time_saved_against_each_reference(summary):
    # medians of the last three: tp1 53.5, tp2 41.5, pat 39.5
    gains = summary["gain_pct"]["gen"]
    assert gains["default"] == gains["worst_static"] == pytest.approx(100 * 14 / 53.5)
    assert gains["best_static"] == pytest.approx(100 * 2 / 41.5)
    assert gains["oracle"] is None
    assert summary["references"]["gen"] == {"default": "tp1", "worst_static": "tp1", "best_static": "tp2"}
    # iteration by iteration against tp2: 41.5 -> 38, 40 -> 41, 43 -> 39.5
    assert summary["gain_spread_pct"]["gen"]["best_static"] == pytest.approx([-100 / 40, 350 / 41.5])


def test_default_worst_and_best_are_told_apart(tmp_path):
    generation = {"tp1": (9.0, 5.0), "tp2": (9.0, 8.0), "tp4": (9.0, 4.0), "pat": (9.0, 6.0)}
    summary = summarise(load(write_experiment(tmp_path, generation)))
    assert summary["references"]["gen"] == {"default": "tp1", "worst_static": "tp2", "best_static": "tp4"}
    gains = summary["gain_pct"]["gen"]
    assert [gains[role] for role in ("default", "worst_static", "best_static")] == pytest.approx([-20, 25, -50])


def test_a_single_iteration_is_kept_and_has_no_spread(tmp_path):
    generation = {"tp1": (5.0,), "tp2": (4.0,), "pat": (3.0,)}
    summary = summarise(load(write_experiment(tmp_path, generation)))
    assert summary["arms"]["tp2"]["gen_s"] == 4.0
    assert summary["spread"] == {"tp1": None, "tp2": None, "pat": None}
    assert summary["gain_pct"]["gen"]["best_static"] == pytest.approx(25)
    assert summary["gain_spread_pct"]["gen"]["best_static"] is None


@pytest.mark.parametrize("arms", [("tp1", "tp2"), ("pat",), ("threshold",)])
def test_what_was_not_run_has_no_gain(tmp_path, arms):
    summary = summarise(load(write_experiment(tmp_path, dict.fromkeys(arms, (3.0, 2.0)))))
    for gains in (*summary["gain_pct"].values(), *summary["gain_spread_pct"].values()):
        assert set(gains.values()) == {None}


def test_the_oracle_is_compared_with_pat_where_both_were_simulated(tmp_path):
    write_experiment(tmp_path)
    write_simulation(tmp_path, {"tp1": 12.0, "pat": 11.0, "oracle": 10.0})
    summary = summarise(load(tmp_path))
    assert summary["gain_pct"]["gen"]["oracle"] == pytest.approx(-10)
    assert summary["gain_pct"]["iteration"]["oracle"] is None


def test_predictor_errors_weigh_each_layout_by_its_shapes(summary):
    assert summary["predictor_error_pct"] == pytest.approx(
        {"decode": (2 * 6 + 5 * 3) / 9, "prefill": 4.0, "switch": 15.0}
    )


def test_a_part_of_the_predictor_that_could_not_be_held_out_has_no_error(tmp_path):
    path = write_experiment(tmp_path) / "predictor" / "errors.json"
    nothing = {"median_abs_pct": None, "p90_abs_pct": None, "n": 0}
    path.write_text(json.dumps({"decode": {"1": {"median_abs_pct": 2, "p90_abs_pct": 3, "n": 1}, "2": nothing}}))
    errors = summarise(load(tmp_path))["predictor_error_pct"]
    assert errors == {"decode": 2, "prefill": None, "switch": None}


@pytest.mark.parametrize(
    ("generation", "fastest"),
    [
        ({"tp1": (9.0, 4.0, 4.0), "pat": (9.0, 3.0, 3.5)}, ("pat", "tp1", True)),
        ({"tp1": (9.0, 4.0, 4.0), "tp2": (9.0, 5.0, 3.5), "pat": (9.0, 6.0, 6.5)}, ("tp1", "tp2", False)),
        ({"tp1": (9.0, 4.0), "pat": (9.0, 3.0)}, ("pat", "tp1", False)),  # once is not often enough
        ({"tp1": (9.0, 4.0)}, ("tp1", None, None)),
    ],
)
def test_the_fastest_arm_and_whether_that_is_settled(tmp_path, generation, fastest):
    found = summarise(load(write_experiment(tmp_path, generation)))["fastest"]
    assert (found["arm"], found["runner_up"], found["every"]) == fastest


def test_what_knows_the_lengths_or_was_changed_cannot_be_the_fastest(tmp_path):
    write_experiment(tmp_path)
    write_simulation(tmp_path, {"tp1": 12.0, "pat": 11.0, "oracle": 9.0, "threshold-best": 9.5, "threshold": 13.0,
                                "pat-lengths-x2": 10.0})  # fmt: skip
    found = summarise(load(tmp_path))["simulated"]["fastest"]
    assert (found["arm"], found["runner_up"], found["every"]) == ("pat", "tp1", True)
    assert found["lead_pct"] == pytest.approx(100 / 12)


def test_the_length_model_is_held_against_what_came(tmp_path):
    summary = summarise(load(write_experiment(tmp_path)))
    assert summary["calibration"]["responses"] == 3 * len(LENGTHS)  # the first iteration has nothing before it
    assert 0 <= summary["calibration"]["mean"] <= summary["calibration"]["largest"] < 0.2  # equal lengths each time
    assert summarise(load(write_experiment(tmp_path / "one", {"pat": (3.0,)})))["calibration"] is None


@pytest.mark.parametrize(
    ("lengths", "share", "equal"),
    [
        ({}, 1.0, [2, 3, 4]),
        ({"pat": LENGTHS[::-1]}, 1.0, [2, 3, 4]),  # the order in which requests arrive does not matter
        ({"pat": (*LENGTHS[:-2], 300, 301)}, 14 / 16, []),
        ({"pat": (*LENGTHS, 5)}, 16 / 17, []),
        ({"tp1": (*LENGTHS[:-1], 7), "pat": (*LENGTHS[:-1], 8)}, 15 / 16, []),
    ],
)
def test_matched_is_the_share_of_responses_with_partners_in_every_arm(tmp_path, lengths, share, equal):
    summary = summarise(load(write_experiment(tmp_path, lengths=lengths)))
    assert summary["matched"] == pytest.approx(share)
    assert summary["matched_iterations"] == equal


def test_one_arm_has_nothing_to_match(tmp_path):
    assert summarise(load(write_experiment(tmp_path, {"tp1": (3.0, 2.0)})))["matched"] is None


def test_the_summary_is_plain_json_also_when_a_number_is_not_one(tmp_path):
    path = write_experiment(tmp_path) / "train" / "pat" / "iterations.parquet"
    pl.read_parquet(path).with_columns(reward_mean=float("nan")).write_parquet(path)
    summary = summarise(load(tmp_path))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["arms"]["pat"]["reward_mean"] is None


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=20).map(
        lambda spans: [(start, start + length) for start, length in spans]
    )
)
def test_the_live_batch_covers_the_requests_and_nothing_else(spans):
    curve = live_batch(pl.DataFrame(spans, schema=["arrive_s", "finish_s"], orient="row"))
    at, live = curve["at_s"].to_list(), curve["live"].to_list()
    assert at == sorted(set(at))
    assert live[-1] == 0
    for time, count in zip(at, live, strict=True):
        assert count == sum(start <= time < end for start, end in spans)
    area = sum(count * (end - start) for start, end, count in zip(at, at[1:], live, strict=False))
    assert math.isclose(area, sum(end - start for start, end in spans))


def test_idle_and_warm_up_switches_are_not_counted(tmp_path):
    experiment = load(write_experiment(tmp_path, switches=2))
    switches = live_switches(experiment.arms["pat"])
    assert switches["iteration"].to_list() == [2, 2, 3, 3, 4, 4]
    assert switches["unfinished"].min() > 0
    assert live_switches(experiment.arms["tp1"]).is_empty()


def test_the_iteration_that_is_drawn_is_the_median_of_pat_and_shared_by_all(tmp_path):
    # pat's kept iterations take 38, 41, 39.5 s: the third of them, iteration 4, is the median
    assert typical_iteration(load(write_experiment(tmp_path / "all")).arms) == 4
    shorter = GENERATION | {"tp1": GENERATION["tp1"][:3]}  # 2 and 3 are shared: 38 and 41 s
    assert typical_iteration(load(write_experiment(tmp_path / "shorter", shorter)).arms) == 2
    apart = {"tp1": (5.0,), "pat": (5.0, 4.0)}
    assert typical_iteration(load(write_experiment(tmp_path / "apart", apart)).arms) is None


def test_the_first_iteration_after_an_interruption_is_no_measurement():
    frame = pl.DataFrame({"iteration": [1, 2, 3, 4], "warm_up": [True, False, True, False]})
    assert kept_iterations(frame)["iteration"].to_list() == [2, 4]
    assert kept_iterations(frame.filter("warm_up"))["iteration"].to_list() == [1, 3]  # nothing else is there


def test_the_nodes_of_a_training_are_told(tmp_path):
    write_experiment(tmp_path, {"tp1": [40.0, 30.0], "pat": [40.0, 20.0]})
    assert summarise(load(tmp_path))["nodes"] == 1
    for file in tmp_path.glob("train/*/run.json"):
        run = json.loads(file.read_text())
        run["config"] = run["config"] | {"train": run["config"]["train"] | {"nodes": 2}}
        file.write_text(json.dumps(run | {"nodes": 2}))
    experiment = load(tmp_path)
    assert summarise(experiment)["nodes"] == 2
    assert "2 nodes of 2 ranks, a group on each" in dict(setup.rows(experiment))["Ranks and sizes"]
