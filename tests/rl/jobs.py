"""Small real trainings: a configuration made from config/ci.yaml, its model and data, and a made-up predictor."""

import subprocess
import sys
from pathlib import Path

import yaml

from pat import configfile
from pat.assets import run as make_assets
from pat.config import stage_config
from pat.predictor import Predictor
from pat.predictor.latency import DecodeModel, PrefillModel
from pat.predictor.regression import Curve
from pat.predictor.switching import SwitchCost, SwitchModel
from tests.workflow.project import ROOT

NONE = Curve((0, 1), (0.0, 0.0))
# A machine where tp 2 is faster for up to two requests and slower for more, so that pat widens in every tail.
WIDENS = Predictor(
    DecodeModel({1: Curve((0, 1), (0.02, 0.02)), 2: Curve((0, 2, 16), (0.008, 0.008, 0.2))}, {1: NONE, 2: NONE}),
    PrefillModel(
        {1: Curve((0, 1), (0.01, 0.01)), 2: Curve((0, 1), (0.01, 0.01))}, {1: (0, 0, 0, 0, 0), 2: (0, 0, 0, 0, 0)}
    ),
    SwitchModel({(a, b, "migrate"): SwitchCost(0.01, 0.0, 0.0) for a, b in ((1, 2), (2, 1))}),
)


def prepare(folder: Path, **changes) -> Path:
    """An experiment ready to train in ``folder``: returns its configuration file. changes: of config/ci.yaml."""
    raw = yaml.safe_load((ROOT / "config" / "ci.yaml").read_text())
    raw["arms"], raw["experiments"] = ["tp1", "pat"], {"small": {}}
    for section, values in changes.items():
        raw[section] |= values
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(raw))
    make_assets(stage_config(configfile.load(file)["small"], "assets"), folder)
    (folder / "predictor").mkdir()
    WIDENS.save(folder / "predictor" / "model.json")
    return file


def train(file: Path, arm: str = "pat") -> list[str]:
    """The command that trains it."""
    return [sys.executable, "-m", "pat.cli", "train", "--arm", arm, "--config", str(file), "--out", str(file.parent)]


def start(command: list[str], log: Path, **options) -> subprocess.Popen:
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **options)
