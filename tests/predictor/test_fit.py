import itertools
import json

import numpy as np
import polars as pl
import pytest

from pat.predictor import Predictor
from pat.predictor.fit import cross_validate, generation_errors, run, summarise
from pat.predictor.latency import DecodeModel


def decode_s(tp, batch, context):
    return (0.06 + 0.009 * batch + 1e-5 * context) / tp**0.5


def switch_s(mode, requests, tokens):
    return 0.2 + 0.01 * requests + {"migrate": 2e-5, "recompute": 8e-4}[mode] * tokens


@pytest.fixture
def samples():
    decode = [
        (tp, b, b * (c + i), decode_s(tp, b, b * (c + i)))
        for tp, b, c, i in itertools.product((1, 2), (1, 2, 4, 8), (32, 192), range(12))
    ]
    prefill = [(tp, 1, n, p, 0.05 + 1e-3 * n / tp) for tp, n, p in itertools.product((1, 2), (16, 64, 192), (0, 64))]
    pairs = itertools.product(((1, 2), (2, 1)), ("migrate", "recompute"), (2, 4, 8))
    switch = [(a, b, mode, r, 100 * r, switch_s(mode, r, 100 * r)) for (a, b), mode, r in pairs]
    schemas = {
        "decode": ["tp", "batch", "context", "seconds"],
        "prefill": ["tp", "requests", "tokens", "prefix", "seconds"],
        "switch": ["tp_from", "tp_to", "mode", "requests", "kv_tokens", "total_s"],
    }
    rows = {"decode": decode, "prefill": prefill, "switch": switch}
    return {name: pl.DataFrame(rows[name], schema=schemas[name], orient="row") for name in rows}


@pytest.fixture
def profile(samples, tmp_path):
    for name, table in samples.items():
        table.write_parquet(tmp_path / f"{name}.parquet")
    return tmp_path


def test_the_stage_writes_a_model_that_predicts_and_its_errors(profile, capsys):
    out = profile / "predictor"
    run(profile, out)
    model = Predictor.load(out / "model.json")
    assert model.decode.seconds(2, 3, 300) == pytest.approx(decode_s(2, 3, 300), rel=0.02)
    assert model.switch.seconds(1, 2, 6, 600, "migrate") == pytest.approx(switch_s("migrate", 6, 600), rel=0.05)
    errors = json.loads((out / "errors.json").read_text())
    assert {name: sorted(groups) for name, groups in errors.items()} == {
        "decode": ["1", "2"],
        "prefill": ["1", "2"],
        "switch": ["1->2", "2->1"],
    }
    for groups in errors.values():
        for error in groups.values():
            assert 0 <= error["median_abs_pct"] <= error["p90_abs_pct"] < 25
            assert error["n"] >= 6
    assert (out / "fit.png").read_bytes().startswith(b"\x89PNG")
    assert "decode" in capsys.readouterr().out


def test_a_shape_is_not_predicted_from_itself(samples):
    odd = (pl.col("tp") == 1) & (pl.col("batch") == 4) & (pl.col("context") >= 4 * 192)
    tripled = pl.when(odd).then(3 * pl.col("seconds")).otherwise("seconds").alias("seconds")
    rows = cross_validate(samples | {"decode": samples["decode"].with_columns(tripled)})["decode"]
    worst = rows.sort("error_pct")["error_pct"][0]
    assert worst < -40  # a fit that had seen it would have moved towards it


def test_every_shape_is_predicted_once(samples):
    rows = cross_validate(samples)["switch"]
    assert rows.group_by("group").len().sort("group").rows() == [("1->2", 6), ("2->1", 6)]


def test_what_cannot_be_held_out_has_no_error(samples):
    lone = samples["switch"].filter(mode="migrate", requests=4)
    errors = summarise(cross_validate(samples | {"switch": lone})["switch"])
    assert errors["1->2"] == {"median_abs_pct": None, "p90_abs_pct": None, "n": 0}


def test_errors_are_absolute_percentages():
    rows = pl.DataFrame({"group": ["1"] * 3, "error_pct": [-10.0, 2.0, 4.0]})
    assert summarise(rows)["1"] == {"median_abs_pct": 4.0, "p90_abs_pct": pytest.approx(8.8), "n": 3}


def test_a_missing_or_empty_table_is_named(profile, tmp_path):
    pl.read_parquet(profile / "switch.parquet").clear().write_parquet(profile / "switch.parquet")
    with pytest.raises(ValueError, match=r"switch\.parquet has no rows"):
        run(profile, tmp_path / "out")
    (profile / "switch.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"switch\.parquet is missing: run the profile stage"):
        run(profile, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "{}", '{"format": 99}', '{"format": 1, "decode": 3}', "[]"])
def test_a_file_that_is_no_predictor_is_named(tmp_path, text):
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"model\.json is not a predictor"):
        Predictor.load(path)


def test_a_saved_predictor_comes_back_equal(profile, tmp_path):
    run(profile, tmp_path / "out")
    model = Predictor.load(tmp_path / "out" / "model.json")
    model.save(tmp_path / "again.json")
    again = Predictor.load(tmp_path / "again.json")
    assert again.switch == model.switch
    batch, context = np.arange(1, 20)[:, None], np.arange(0, 5000, 100)
    np.testing.assert_array_equal(again.decode.seconds(2, batch, context), model.decode.seconds(2, batch, context))
    np.testing.assert_array_equal(
        again.prefill.seconds(1, batch, context, 10), model.prefill.seconds(1, batch, context, 10)
    )


def trace(factor):
    """Decode steps of a generation whose steps take `factor` times what the profile says, by tp."""
    rows = [
        (tp, batch, batch * (40 + i), factor[tp] * decode_s(tp, batch, batch * (40 + i)))
        for tp in factor
        for batch in (1, 2, 4, 8)
        for i in range(20)
    ]
    return pl.DataFrame(rows, schema=["tp", "batch", "context", "seconds"], orient="row")


def test_a_machine_that_became_slower_shows_by_size(samples):
    model = DecodeModel.fit(samples["decode"])
    errors = summarise(generation_errors(model, trace({1: 1.0, 2: 1.25})))
    assert errors["1"]["median_abs_pct"] < 2
    assert errors["2"]["median_abs_pct"] == pytest.approx(20, abs=2)


def test_a_size_that_was_not_profiled_is_left_out(samples):
    model = DecodeModel.fit(samples["decode"])
    assert set(summarise(generation_errors(model, trace({2: 1.0, 4: 1.0})))) == {"2"}


def test_the_generations_of_a_profile_are_a_part_of_the_errors(profile, capsys):
    trace({1: 1.0, 2: 1.0}).write_parquet(profile / "generation.parquet")
    run(profile, profile / "out")
    errors = json.loads((profile / "out" / "errors.json").read_text())
    assert set(errors["generation"]) == {"1", "2"}
    assert errors["generation"]["1"]["median_abs_pct"] < 2
    assert "generation" in capsys.readouterr().out
    trace({}).clear().write_parquet(profile / "generation.parquet")  # as of published measurements
    run(profile, profile / "out")
    assert "generation" not in json.loads((profile / "out" / "errors.json").read_text())


def test_a_prefill_that_was_seen_once_is_not_judged(samples):
    seen_often = pl.concat([samples["prefill"]] * 3)
    once = pl.DataFrame(
        [(tp, 1, 40, 0, 9.9) for tp in (1, 2)], schema=["tp", "requests", "tokens", "prefix", "seconds"], orient="row"
    )
    with_it = cross_validate(samples | {"prefill": pl.concat([seen_often, once])})["prefill"]
    assert len(with_it) == len(cross_validate(samples)["prefill"])  # where all were seen once, all are judged
    assert with_it["error_pct"].abs().median() < 5
