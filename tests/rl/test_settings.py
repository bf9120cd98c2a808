"""What a verl job may say under rollout.custom.pat, and what it gets if it says nothing."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from pat.arms import from_config
from pat.policy import Static
from pat.rl.settings import Settings


@pytest.mark.parametrize("custom", [None, {}, {"other": 1}, {"pat": {}}])
def test_nothing_said_is_the_predictive_policy_over_all_powers_of_two(custom):
    settings = Settings.from_verl(custom, ranks=8)
    assert (settings.policy, settings.tp_sizes) == ("pat", (1, 2, 4, 8))
    assert (settings.requests, settings.lengths, settings.log) == (None, None, None)


@pytest.mark.parametrize(("ranks", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2)), (12, (1, 2, 4)), (3, (1,))])
def test_default_sizes_divide_the_ranks(ranks, sizes):
    assert Settings.from_verl(None, ranks).tp_sizes == sizes


def test_what_is_said_holds_also_as_hydra_hands_it_over():
    said = {
        "policy": "tp2",
        "tp_sizes": [1, 2],
        "lengths": [5, 6],
        "log": "/tmp/x",
        "kv": "recompute",
        "margin": 0.5,
    }
    plain = Settings.from_verl({"pat": said}, ranks=8)
    assert Settings.from_verl(OmegaConf.create({"pat": said}), ranks=8) == plain
    assert (plain.tp_sizes, plain.lengths, plain.log) == ((1, 2), (5, 6), Path("/tmp/x"))
    assert plain.policy_settings == {
        "margin": 0.5,
        "max_switch_share": 0.1,
        "max_switches": 4,
        "kv": "recompute",
    }


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"polcy": "tp1"}, "polcy"),
        ({"kv": "teleport"}, "'auto', 'migrate' or 'recompute'"),
        ({"tp_sizes": ["two"]}, "tp_sizes"),
        ({"requests": "many"}, "requests"),
    ],
)
def test_a_wrong_key_or_value_is_named(said, told):
    with pytest.raises(ValidationError) as caught:
        Settings.from_verl({"pat": said}, ranks=2)
    assert told in str(caught.value)


def test_policy_settings_are_what_a_policy_takes():
    settings = Settings.from_verl({"pat": {"policy": "tp2"}}, ranks=2)
    assert from_config(settings.policy, settings.tp_sizes, settings.policy_settings, None) == Static(2)
