import itertools
import json
from pathlib import Path

import pytest

from pat import bench_decision
from pat.bench_decision import Timed, generation, measure, state
from pat.policy import Decision, Static
from pat.simulate import Requests
from tests.simulate.machines import machine


class Slow:
    """Takes its time, and sees how often it is asked."""

    def __init__(self):
        self.states = []

    def decide(self, state):
        self.states.append(state)
        return Decision(state.tp)

    def observe(self, lengths, finished):
        pass

    def observe_steps(self, tp, batch, context, seconds):
        pass


def test_a_state_deals_its_requests_evenly():
    made = state(machine(ranks=4), live=6, prompt=10, generated=5, cap=99)
    assert [len(replica) for replica in made.replicas] == [2, 2, 1, 1]
    assert {(request.prompt, request.generated) for request in made.live} == {(10, 5)}
    assert (made.tp, made.cap) == (1, 99)


def test_every_measured_decision_is_another_state():
    policy = Slow()
    found = measure(machine(), policy, live=16, prompt=10, cap=80, repeats=5)
    assert len({policy.states[i].live[0].generated for i in range(7)}) == 7
    assert 0 < found["decision_p10_s"] <= found["decision_s"] <= found["decision_p90_s"]
    assert found["of_a_step_pct"] == pytest.approx(100 * found["decision_s"] / found["step_s"])


def test_all_decisions_of_a_generation_count():
    policy = Slow()
    found = generation(machine(), policy, Requests.of([5, 50, 200, 200], 10, 200))
    assert found["decisions"] == len(policy.states) >= 4  # at least one for each end
    assert found["share_pct"] == pytest.approx(100 * found["decision_s"] / found["gen_s"])


def test_a_timed_policy_decides_the_same():
    timed = Timed(Static(2))
    assert timed.decide(state(machine(), 4, 10, 5, 99)).tp == 2
    assert len(timed.seconds) == 1


def test_the_command_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    from typer.testing import CliRunner

    from pat.cli import app

    folder = tmp_path / "results" / "ci-qwen3" / "predictor"
    folder.mkdir(parents=True)
    machine().predictor.save(folder / "model.json")
    config = Path("config/ci.yaml").resolve()
    monkeypatch.chdir(tmp_path)
    command = ["bench", "decision", "--config", str(config), "--experiment", "ci-qwen3", "--live", "4,16"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "results" / "bench" / "decision.json").read_text())
    assert [row["live"] for row in written["decisions"]] == [4, 16]
    assert [row["responses"] for row in written["generations"]] == [4, 16]
    assert all(row["decisions"] > 0 for row in written["generations"])


def test_a_slow_policy_is_asked_less_often(monkeypatch):
    clock = iter(0.05 * tick for tick in range(10_000))  # a decision takes 50 ms: not again within 10 s
    monkeypatch.setattr(bench_decision.time, "perf_counter", lambda: next(clock))
    policy = Slow()
    generation(machine(), policy, Requests.of([5, 50, 200, 200], 10, 200))
    asked = [each.elapsed_s for each in policy.states[1:]]
    assert len(asked) >= 2
    assert min(after - before for before, after in itertools.pairwise(asked)) >= 10 - 1e-9
