"""The simulator against the machine: real generations take what was simulated from a profile made just before."""

import json

import pytest

from pat import bench, configfile
from pat import profile as profiling
from pat.config import stage_config
from pat.predictor import fit
from pat.workload import Workload

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timing]
BOUND_PCT = 10
REPEATS = 3
WORKLOADS = {
    "tail": Workload(lengths=[20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 240, 250, 256, 256]),
    "alike": Workload(lengths=[96] * 16),
}
CONFIG = """
ranks: 2
tp_sizes: [1, 2]
arms: [tp1, pat]
model: {source: tiny-qwen3}
data: {source: arithmetic}
rollout: {max_prompt: 64, max_response: 256, kv_tokens: 8192}
profile: {batches: [1, 2, 4, 8], contexts: [64, 192, 320], prefill: [16, 64], steps: 24, repeats: 2}
experiments: {tiny: {}}
"""


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """rollout.json of every workload and arm, and errors.json, on a random model of one wide layer."""
    from pat.assets import models

    folder = tmp_path_factory.mktemp("validation")
    path = folder / "config.yaml"
    path.write_text(CONFIG)
    config = configfile.load(path)["tiny"]
    models.write(config.model.source, config.model.dtype, config.tp_sizes, config.seed, folder / "model")
    profiling.run(stage_config(config, "profile"), folder)
    fit.run(folder / "profile", folder / "predictor")
    bench.run(stage_config(config, "train-pat"), folder, WORKLOADS, REPEATS, folder / "bench")
    return json.loads((folder / "bench" / "rollout.json").read_text())["workloads"], json.loads(
        (folder / "predictor" / "errors.json").read_text()
    )


def test_simulated_generations_take_as_long_as_real_ones(replayed):
    """Medians of the repeats, of every workload and arm. A machine that is busy with something else fails this."""
    errors = {
        (name, arm): 100 * (workload["predicted_s"][arm] / measured["median"] - 1)
        for name, workload in replayed[0].items()
        for arm, measured in workload["arms"].items()
    }
    assert set(errors) == {(name, arm) for name in WORKLOADS for arm in ("tp1", "tp2", "threshold", "pat")}
    assert max(map(abs, errors.values())) <= BOUND_PCT, errors


def test_the_oracle_is_behind_no_arm_of_the_simulation(replayed):
    for workload in replayed[0].values():
        assert 0 < workload["oracle_s"] <= min(workload["predicted_s"].values())


def test_the_errors_of_real_generations_are_told_by_size(replayed):
    generation = replayed[1]["generation"]
    assert set(generation) == {"1", "2"}
    assert all(error["n"] > 0 and error["median_abs_pct"] >= 0 for error in generation.values())
