"""Workloads: read from a file, drawn from a seed, refused with the key and the reason."""

from pathlib import Path

import pytest
import yaml

from pat import workload
from pat.problems import ConfigError
from pat.workload import Replay, Workload

SHIPPED = Path("config/workloads.yaml")


def test_the_shipped_workloads_are_what_they_say():
    found = workload.load(SHIPPED)
    lengths = {name: one.draw(seed=1) for name, one in found.items()}
    assert lengths["a"] == [19, 37, 77, 79, 83, 98, 100, 104, 154, 157, 440, 474, 512, 512, 512, 512]
    assert sorted(lengths["b"])[-4:] == [512] * 4
    assert all(32 <= n <= 64 for n in sorted(lengths["b"])[:60])
    assert lengths["c"] == [128] * 16
    assert len(lengths["d"]) == 48
    assert max(lengths["d"]) <= 512
    assert len(lengths["e"]) == 64


def test_a_seed_decides_what_is_drawn():
    one = workload.load(SHIPPED, ["d"])["d"]
    assert one.draw(3) == one.draw(3) != one.draw(4)


def test_samples_of_a_prompt_share_it():
    replay = Replay.of("e", workload.load(SHIPPED, ["e"])["e"], vocabulary=50, seed=1)
    assert len(replay.prompts) == 64
    assert all(replay.prompts[i] == replay.prompts[i - i % 8] for i in range(64))
    assert len({tuple(prompt) for prompt in replay.prompts}) == 8
    assert all(len(prompt) == 128 and max(prompt) < 50 for prompt in replay.prompts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lengths": [3], "groups": [{"count": 1, "low": 1, "high": 1}]}, "exactly one of"),
        ({}, "exactly one of"),
        ({"lengths": []}, "at least 1 item"),
        ({"lengths": [0]}, "greater than or equal to 1"),
        ({"groups": [{"count": 1, "low": 5, "high": 4}]}, "low 5 is above high 4"),
        ({"lengths": [3], "promt": 4}, "Extra inputs are not permitted"),
    ],
)
def test_a_mistake_names_its_workload(tmp_path, change, said):
    file = tmp_path / "w.yaml"
    file.write_text(yaml.safe_dump({"mine": change}))
    with pytest.raises(ConfigError, match="config error: mine") as error:
        workload.load(file)
    assert said in str(error.value)


def test_an_unknown_name_and_a_missing_file_say_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match="some of a, b, c, d, e"):
        workload.load(SHIPPED, ["a", "z"])
    with pytest.raises(ConfigError, match="a file that can be read"):
        workload.load(tmp_path / "none.yaml")


def test_lengths_are_cut_at_the_cap():
    one = Workload(lognormal={"count": 500, "mu": 7.916, "sigma": 0.887, "cap": 8192})
    drawn = one.draw(1)
    assert max(drawn) == 8192
    assert 0.05 < sum(n == 8192 for n in drawn) / 500 < 0.17  # 10.85 % of this law are longer
