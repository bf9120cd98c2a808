"""The lengths to simulate, and what the stage writes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pat import config as schema
from pat import configfile
from pat.simulate import lengths
from pat.simulate.run import SCHEMA, run
from tests.simulate.machines import CAP, STEPS, predictor

ROOT = Path(__file__).parents[2]
PMF = ROOT / "tests" / "data" / "deepseek_r1_output_tokens_pmf.csv"


def test_lengths_of_every_kind(tmp_path):
    rng = np.random.default_rng(0)
    pl.DataFrame({"length": [5, 7, 900]}).write_parquet(tmp_path / "seen.parquet")
    kinds = [
        ({}, [3, 1, 2], {3, 1, 2}),
        ({"kind": "listed", "tokens": [4, 6]}, None, {4, 6}),
        ({"kind": "uniform", "low": 3, "high": 5}, None, {3, 4, 5}),
        ({"kind": "file", "path": str(tmp_path / "seen.parquet")}, None, {5, 7, 512}),
        ({"kind": "file", "path": str(tmp_path / "seen.parquet"), "scale": 2.0}, None, {10, 14, 512}),
    ]
    for section, replayed, expected in kinds:
        draw = lengths.from_config(schema.Lengths(**section), replayed, CAP)
        assert set(draw(rng, 200).tolist()) == expected
    tokens = lengths.from_config(schema.Lengths(), None, CAP)(rng, 4000)
    assert np.median(tokens) == pytest.approx(np.exp(7.916) * CAP / lengths.FITTED_CAP, rel=0.1)
    assert (tokens == CAP).mean() == pytest.approx(0.0067, abs=0.004)


def test_published_lengths_are_drawn_as_often_as_they_say():
    tokens = lengths.read(PMF)(np.random.default_rng(0), 20_000)
    frame = pl.read_csv(PMF)
    mean = (frame["output_tokens"] * frame["probability"]).sum() / frame["probability"].sum()
    assert tokens.mean() == pytest.approx(mean, rel=0.05)


def test_files_without_lengths_are_named(tmp_path):
    pl.DataFrame({"tokens": [5]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet lacks the columns length"):
        lengths.read(tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("output_tokens,probability\n5,0\n")
    with pytest.raises(ValueError, match=r"b\.csv has no lengths, or no probabilities"):
        lengths.read(tmp_path / "b.csv")


def test_the_stage_writes_what_it_says(tmp_path):
    model = tmp_path / "model.json"
    predictor({1: STEPS[1], 2: STEPS[2]}).save(model)
    changed = {"train": {"nodes": 2}, "simulate": {"responses": 24, "repeats": 2, "ablations": True}}
    config = configfile.parse(configfile.merge(configfile.read(ROOT / "config" / "config.yaml"), changed))
    run(schema.stage_config(config["smollm2-gsm"], "simulate"), model, tmp_path / "simulate")
    frame = pl.read_parquet(tmp_path / "simulate" / "arms.parquet")
    assert frame.schema == pl.Schema(SCHEMA)
    names = set(frame["arm"])
    assert {"tp1", "tp2", "pat", "threshold", "threshold-best", "oracle", "pat-one-switch"} <= names
    assert len(frame) == 2 * len(names)
    assert frame.group_by("repeat").agg(pl.col("tokens").n_unique())["tokens"].to_list() == [1, 1]  # matched lengths
    summary = json.loads((tmp_path / "simulate" / "summary.json").read_text())
    assert set(summary["arms"]) == names
    assert all(values["gen_s"] >= summary["arms"]["oracle"]["gen_s"] for values in summary["arms"].values())
    assert all(regret >= 0 for regret in summary["regret_pct"].values())
    assert summary["gain_pct"]["oracle"] <= 0
    assert summary["stage"]["nodes"] == 2


def test_simulating_needs_no_engine():
    heavy = {"torch", "sglang", "verl", "mlflow", "matplotlib"}
    code = f"import sys, pat.simulate.run; print({heavy} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"
