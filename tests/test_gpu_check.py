"""`pat gpu-check`: one file whatever happens, with what failed by name. With parts that are fakes, and on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pat import cli, gpu_check
from pat.gpu_check.report import Report

ROOT = Path(__file__).parents[1]


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "_gpus", lambda: 0)
    done = CliRunner().invoke(cli.app, ["gpu-check", "--out", str(tmp_path / "out.json")])
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "gpu-check: no GPU that torch can use on this machine: --cpu tries the check itself on a tiny model"
    ]
    assert not (tmp_path / "out.json").exists()


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    """Parts that are Python lines: {part: code}, which finds ``plan``."""

    def use(**codes):
        for part, code in codes.items():
            (tmp_path / f"{part}.py").write_text(
                "import json, sys, time\nfrom pathlib import Path\nplan = json.loads(Path(sys.argv[2]).read_text())\n"
                "def give(found): Path(plan['out']).write_text(json.dumps(found))\n" + code
            )
        monkeypatch.setattr(gpu_check, "MEASURE", (sys.executable, str(tmp_path / "part.py")))
        (tmp_path / "part.py").write_text(
            f"import runpy, sys\nrunpy.run_path({str(tmp_path)!r} + '/' + sys.argv[1] + '.py')\n"
        )

    return use


PAT = "give({'decode': [], 'switches': [], 'graph_memory_bytes': {'1': 5}})"
STOCK = "give({'decode': [{'engine': 'stock', 'tp': plan['tp'], 'batch': 1, 'step_ms': [2.0, 2.5]}]})"
ROWS = [
    {"name": "a", "outcome": "passed", "seconds": 1.0, "message": ""},
    {"name": "b", "outcome": "skipped", "seconds": 0.0, "message": "needs two GPUs"},
]
TESTS = f"Path(plan['lines']).write_text('\\n'.join(json.dumps(row) for row in {ROWS}))\ngive({{}})"


def read(path):
    return Report.model_validate_json(path.read_text())


def test_parts_that_go_well_are_one_report(fakes, tmp_path):
    fakes(pat=PAT, stock=STOCK, tests=TESTS)
    assert gpu_check.run(tmp_path / "out.json", cpu=True)
    report = read(tmp_path / "out.json")
    assert [(part.name, part.outcome) for part in report.parts] == [
        ("pat", "done"),
        ("stock tp 1", "done"),
        ("stock tp 2", "done"),
        ("tests", "done"),
    ]
    assert [row.tp for row in report.decode] == [1, 2]
    assert [(test.name, test.outcome) for test in report.tests] == [("a", "passed"), ("b", "skipped")]
    assert report.graph_memory_bytes == {1: 5}
    assert report.machine.versions["sglang"]


def test_what_fails_or_takes_too_long_is_named_and_the_rest_goes_on(fakes, monkeypatch, tmp_path, capsys):
    failing = TESTS.replace("'skipped'", "'failed'") + "\ntime.sleep(60)"
    fakes(pat="raise SystemExit('no such kernel')", stock=STOCK, tests=failing)
    monkeypatch.setattr(gpu_check, "LIMIT_S", {"pat": 30.0, "stock": 30.0, "tests": 6.0})
    assert not gpu_check.run(tmp_path / "out.json", cpu=True)
    report = read(tmp_path / "out.json")
    outcomes = {part.name: part for part in report.parts}
    assert outcomes["pat"].why == "exit status 1: no such kernel"
    assert outcomes["tests"].why.startswith("took longer than 6 s")
    assert len(report.decode) == 2
    assert [test.name for test in report.tests if test.outcome == "failed"] == ["b"]  # was written before the end
    assert "failed: b" in capsys.readouterr().out


def test_tests_that_were_all_skipped_are_no_success(fakes, tmp_path):
    fakes(pat=PAT, stock=STOCK, tests=TESTS.replace("'passed'", "'skipped'"))
    assert not gpu_check.run(tmp_path / "out.json", cpu=True)
    assert read(tmp_path / "out.json").parts[-1].why == "no test passed: each was skipped or failed"


def test_nothing_starts_after_the_deadline(fakes, tmp_path):
    fakes(pat=PAT, stock=STOCK, tests=TESTS)
    assert not gpu_check.run(tmp_path / "out.json", cpu=True, minutes=0)
    assert {part.why for part in read(tmp_path / "out.json").parts} == {"no time was left"}


def test_on_one_gpu_two_ranks_share_it_and_stock_runs_at_tp_1_only(fakes, monkeypatch, tmp_path):
    """No GPU is touched: the parts are fakes."""
    monkeypatch.setattr(gpu_check, "_gpus", lambda: 1)
    fakes(pat="assert plan['one_device'] and plan['tp_sizes'] == [1, 2]\n" + PAT, stock=STOCK, tests=TESTS)
    assert gpu_check.run(tmp_path / "out.json")
    report = read(tmp_path / "out.json")
    assert report.one_device
    assert {part.name: part.why for part in report.parts if part.outcome == "not run"} == {
        "stock tp 2": "needs 2 GPUs, there is 1"
    }


@pytest.mark.engine
@pytest.mark.slow
def test_the_check_itself_on_a_cpu(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "pat.cli", "gpu-check", "--cpu", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=640)
    assert done.returncode == 0, done.stdout + done.stderr
    report = read(out)
    assert report.ok
    assert {(row.engine, row.tp, row.batch) for row in report.decode} == {
        (engine, tp, batch) for engine in ("pat", "stock") for tp in (1, 2) for batch in (1, 4)
    }
    assert all(len(row.step_ms) == 2 for row in report.decode)
    assert [(one.tp_from, one.tp_to) for one in report.switches] == [(1, 2), (2, 1)] * 2
    assert all(one.unfinished for one in report.switches)
    assert all(abs(sum(one.phases.values()) - one.phases["exchange"] - one.total_s) < 1e-6 for one in report.switches)
    assert len(report.tests) > 5
    assert json.loads(out.read_text())["model"]["vocab_size"] == 512
