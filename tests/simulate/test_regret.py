"""How far PAT stays from the oracle, on machines that have published measurements, without a GPU."""

import numpy as np
import pytest

from pat import configfile
from pat.config import stage_config
from pat.predictor import Predictor, fit, reference
from pat.simulate import Machine, Oracle, Requests, arms, simulate
from tests.workflow.project import ROOT

pytestmark = pytest.mark.slow
NAMES = ["h100-llama3.1-8b", "l40s-llama3.1-8b"]
SEEDS = range(3)


@pytest.fixture(scope="module", params=NAMES)
def scenario(request, tmp_path_factory):
    """(machine, settings) of a configuration in config/, its predictor made as the pipeline makes it."""
    config = configfile.load(ROOT / "config" / f"{request.param}.yaml")[f"{request.param}-128"]
    folder = tmp_path_factory.mktemp(request.param)
    reference.run(stage_config(config, "profile"), folder)
    fit.run(folder / "profile", folder / "predictor")
    predictor = Predictor.load(folder / "predictor" / "model.json")
    return Machine(predictor, config.ranks, tuple(config.tp_sizes), config.rollout.kv_tokens), config


def outcomes(machine, config, draw, responses):
    """Seconds of pat, of the best static size and of the oracle, of one iteration after two others."""
    limits = {key: getattr(config.policy, key) for key in ("margin", "max_switch_share", "max_switches", "kv")}
    cap = config.rollout.max_response
    history = [(seen, seen < cap) for seen in (draw(responses), draw(responses))]
    requests = Requests.of(draw(responses), 512, cap, config.rollout.samples)
    pat = simulate(machine, lambda: arms.pat(machine, limits)(history), requests)
    static = [simulate(machine, lambda arm=arm: arm([]), requests) for arm in arms.statics(machine).values()]
    oracle = Oracle(machine, handed_in=[pat, *static]).simulate(requests)
    return pat.seconds, min(each.seconds for each in static), oracle.seconds


@pytest.mark.parametrize("responses", [128, 512])
def test_pat_is_within_five_percent_of_the_oracle(scenario, responses):
    machine, config = scenario
    regrets = []
    for rng in map(np.random.default_rng, SEEDS):

        def draw(count, rng=rng):
            tokens = rng.lognormal(7.916, 0.887, count).astype(int) + 1
            return np.minimum(tokens, config.rollout.max_response)

        pat, static, oracle = outcomes(machine, config, draw, responses)
        assert oracle <= min(pat, static)
        regrets.append(100 * (pat / oracle - 1))
    assert np.median(regrets) <= 5, regrets


@pytest.mark.parametrize("spread", [0, 2000])
def test_on_uniform_lengths_pat_is_never_slower_than_the_best_static_size(scenario, spread):
    machine, config = scenario
    for rng in map(np.random.default_rng, SEEDS):

        def draw(count, rng=rng):
            return rng.integers(4000 - spread, 4001 + spread, count)

        pat, static, _ = outcomes(machine, config, draw, 128)
        assert pat <= 1.01 * static
