"""``pat bench rollout`` on a real engine: all arms generate the same lengths, in turn, and are told apart."""

import json
from dataclasses import dataclass, field

import polars as pl
import pytest

from pat.bench import Bench, learn, rotated
from pat.bench_record import Record
from pat.policy import Decision, Static, Threshold
from pat.predictor import Predictor
from pat.predictor.latency import DecodeModel, PrefillModel
from pat.predictor.regression import Curve
from pat.predictor.switching import SwitchCost, SwitchModel
from pat.report.bench import best_static, error_pct, page, worst_error
from pat.simulate import Machine
from pat.workload import Replay, Workload
from tests.engine.conftest import start

STEP_S = {1: 0.010, 2: 0.008}
MACHINE = Machine(
    Predictor(
        DecodeModel(
            {tp: Curve((0.0,), (s,)) for tp, s in STEP_S.items()}, {tp: Curve((0.0,), (0.0,)) for tp in STEP_S}
        ),
        PrefillModel(
            {tp: Curve((0.0,), (s,)) for tp, s in STEP_S.items()}, dict.fromkeys(STEP_S, (0.0, 0.0, 0.0, 0.0, 0.0))
        ),
        SwitchModel({(1, 2, "migrate"): SwitchCost(0.05, 0.0, 0.0), (2, 1, "migrate"): SwitchCost(0.05, 0.0, 0.0)}),
    ),
    ranks=2,
    tp_sizes=(1, 2),
    kv_tokens=2048,
)
REPLAY = Replay.of("mine", Workload(lengths=[4, 6, 200, 200], prompt=8, about="a tail"), 500, seed=1)
ABOUT = {"model": "m", "ranks": 2, "seed": 1}


def test_arms_take_turns():
    arms = ["tp1", "tp2", "pat"]
    orders = [rotated(arms, repeat) for repeat in range(4)]
    assert orders[0] == orders[3] == arms
    assert [order[0] for order in orders[:3]] == arms
    assert all(sorted(order) == sorted(arms) for order in orders)


@dataclass
class Learner:
    """Switches as soon as it has seen a generation before."""

    seen: list = field(default_factory=list)

    def decide(self, state):
        return Decision(2 if self.seen else 1, kv="migrate")

    def observe(self, lengths, finished):
        self.seen.append((list(lengths), list(finished)))

    def observe_steps(self, tp, batch, context, seconds):
        pass


@pytest.mark.engine
def test_every_arm_is_measured_on_the_same_lengths_and_simulated(model_folder, tmp_path):
    engine = start(model_folder("qwen3"), tp_sizes=(1, 2), max_total_tokens=2048)
    arms = {"tp1": Static(1), "tp2": Static(2), "threshold": Threshold(2, 2), "pat": Learner()}
    record = Record(tmp_path, {"settings": 1}, ABOUT)
    assert record.add(REPLAY, list(arms)) == 0
    try:
        bench = Bench(engine, MACHINE, deadline_s=60)
        bench.warm_up(REPLAY, arms)
        assert arms["pat"].seen == []
        for repeat in range(2):
            record.keep("mine", bench.run(REPLAY, arms, repeat))
            record.write()
    finally:
        engine.shutdown()
    assert arms["pat"].seen == [([4, 6, 200, 200], [True, True, False, False])] * 2
    document = json.loads((tmp_path / "rollout.json").read_text())
    found = document["workloads"]["mine"]
    assert list(found["arms"]) == list(arms)
    for arm in found["arms"].values():
        assert len(arm["gen_s"]) == len(arm["decision_s"]) == 2
        assert min(arm["gen_s"]) <= arm["median"] <= max(arm["gen_s"])
        assert min(arm["gen_s"]) > sum(arm["decision_s"]) > 0
    assert found["arms"]["tp1"]["switches"] == found["arms"]["tp2"]["switches"] == [[]] * 2
    assert [[s[:2] for s in switches] for switches in found["arms"]["threshold"]["switches"]] == [[[1, 2]]] * 2
    # 199 decode steps after the prefill, whose batch does not matter on that machine.
    for tp in (1, 2):
        arm = found["arms"][f"tp{tp}"]
        assert arm["predicted_s"] == pytest.approx([200 * STEP_S[tp] * pace[str(tp)] for pace in arm["pace"]])
    # Its knowledge before each repeat is what is simulated: nothing in the first, hence tp 1.
    pat = found["arms"]["pat"]
    expected = [200 * STEP_S[tp] * pace[str(tp)] for tp, pace in zip((1, 2), pat["pace"], strict=True)]
    assert pat["predicted_s"] == pytest.approx(expected)
    assert found["oracle_s"] <= min(found["predicted_s"].values())
    steps = pl.read_parquet(tmp_path / "steps.parquet")
    assert set(steps["arm"]) == set(arms)
    for (arm, _), part in steps.filter(pl.col("arm") != "threshold").group_by("arm", "repeat"):
        assert part.filter(decode=1).group_by("rank").len()["len"].max() >= 199
        assert set(part["tp"]) <= {1, 2} if arm == "pat" else {int(arm[-1])}
    html = (tmp_path / "rollout.html").read_text()
    assert f"{best_static(found):.2f}" in html
    assert all(f"<td>{name}</td>" in html for name in arms)
    assert "<svg" in html


def repeat_of(seconds, predicted=1.0):
    """A repeat as `Bench.run` returns it."""
    result = {"gen_s": seconds, "switches": [], "switch_s": 0.0, "decisions": 3, "decision_s": 0.01, "pace": {"1": 1.0}}
    steps = pl.DataFrame({"workload": ["mine"], "seconds": [0.1]})
    arms = ("tp1", "pat")
    return {
        "arms": dict.fromkeys(arms, result),
        "predicted": dict.fromkeys(arms, predicted),
        "oracle_s": 0.9,
        "steps": steps,
    }


def test_a_bench_goes_on_with_what_is_there(tmp_path):
    first = Record(tmp_path, {"settings": 1}, ABOUT)
    first.add(REPLAY, ["tp1", "pat"])
    first.keep("mine", repeat_of(1.0))
    first.keep("mine", repeat_of(3.0, predicted=2.0))
    first.write()
    again = Record(tmp_path, {"settings": 1}, ABOUT)
    assert again.add(REPLAY, ["tp1", "pat"]) == 2
    other = Replay.of("other", Workload(lengths=[3]), 500, seed=1)
    assert again.add(other, ["tp1", "pat"]) == 0
    again.keep("mine", repeat_of(8.0))
    again.write()
    document = json.loads((tmp_path / "rollout.json").read_text())
    assert list(document["workloads"]) == ["mine"]  # the other has no results yet
    found = document["workloads"]["mine"]
    assert found["arms"]["pat"]["gen_s"] == [1.0, 3.0, 8.0]
    assert found["arms"]["pat"]["median"] == 3.0
    assert found["predicted_s"] == {"tp1": 1.0, "pat": 1.0}
    assert len(pl.read_parquet(tmp_path / "steps.parquet")) == 3


@pytest.mark.parametrize(
    ("same", "replay", "arms", "said"),
    [
        ({"settings": 2}, REPLAY, ["tp1", "pat"], "another settings"),
        ({"settings": 1}, Replay.of("mine", Workload(lengths=[5]), 500, seed=1), ["tp1", "pat"], ""),
        ({"settings": 1}, REPLAY, ["tp1", "tp2"], ""),
    ],
)
def test_results_of_something_else_are_not_continued(tmp_path, capsys, same, replay, arms, said):
    first = Record(tmp_path, {"settings": 1}, ABOUT)
    first.add(REPLAY, ["tp1", "pat"])
    first.keep("mine", repeat_of(1.0))
    first.write()
    again = Record(tmp_path, same, ABOUT)
    assert again.add(replay, arms) == 0
    assert said in capsys.readouterr().out
    assert again.workloads["mine"]["lengths"] == replay.lengths


def test_what_was_learnt_before_an_interruption_is_learnt_again():
    policy = Learner()
    learn(policy, REPLAY)
    assert policy.seen == [([4, 6, 200, 200], [True, True, False, False])]


def test_the_page_names_the_worst_prediction():
    arm = {"gen_s": [1.9, 2.1], "median": 2.0, "switches": [[], [[1, 2, 4]]], "decision_s": [0.0, 0.0]}
    workload = {
        "about": "x", "lengths": [1, 2], "arms": {"tp1": arm, "pat": arm}, "predicted_s": {"tp1": 1.9, "pat": 2.3},
        "oracle_s": 1.5,
    }  # fmt: skip
    document = {"about": ABOUT, "workloads": {"w": workload}}
    assert error_pct(workload) == pytest.approx({"tp1": -5.0, "pat": 15.0})
    assert worst_error(document) == ("w", "pat", pytest.approx(15.0))
    html = page(document)
    assert "workload w, arm pat" in html.replace("\n", " ")
    assert "+15.0 %" in html
    assert worst_error({"workloads": {"w": workload | {"predicted_s": {}}}}) is None
