"""``pat bench rollout`` on a real engine: all arms generate the same lengths, in turn, and are told apart."""

import json

import pytest

from pat.bench import Bench, rotated
from pat.policy import Static, Threshold
from pat.report.bench import best_static, page
from pat.workload import Replay, Workload
from tests.engine.conftest import start


def test_arms_take_turns():
    arms = ["tp1", "tp2", "pat"]
    orders = [rotated(arms, repeat) for repeat in range(4)]
    assert orders[0] == orders[3] == arms
    assert [order[0] for order in orders[:3]] == arms
    assert all(sorted(order) == sorted(arms) for order in orders)


@pytest.mark.engine
def test_every_arm_is_measured_on_the_same_lengths(model_folder):
    engine = start(model_folder("qwen3"), tp_sizes=(1, 2), max_total_tokens=2048)
    try:
        arms = {"tp1": Static(1), "tp2": Static(2), "threshold": Threshold(2, 2)}
        workload = Workload(lengths=[4, 6, 300, 300], prompt=8, about="a tail")
        result = Bench(engine, lambda responses: arms).run(Replay.of("mine", workload, 500, seed=1), repeats=3)
    finally:
        engine.shutdown()
    assert set(result["arms"]) == set(arms)
    for arm in result["arms"].values():
        assert len(arm["gen_s"]) == 3
        assert min(arm["gen_s"]) <= arm["median"] <= max(arm["gen_s"])
        assert all(seconds > 0 for seconds in arm["gen_s"])
    assert result["arms"]["tp1"]["switches"] == result["arms"]["tp2"]["switches"] == [[]] * 3
    assert [[s[:2] for s in switches] for switches in result["arms"]["threshold"]["switches"]] == [[(1, 2)]] * 3
    assert engine.layout.tp == 1
    document = {
        "workloads": {"mine": json.loads(json.dumps(result))},
        "about": {"model": "m", "ranks": 2, "repeats": 3},
    }
    html = page(document)
    assert f"{best_static(result):.2f}" in html
    for name in arms:
        assert f"<td>{name}</td>" in html
    assert "<svg" in html
