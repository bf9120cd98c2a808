import threading

import polars as pl
import pytest

from pat import usage


def test_the_machine_is_sampled_while_the_block_runs(tmp_path, monkeypatch):
    path, three = tmp_path / "train" / "usage.parquet", threading.Event()
    taken, sample = [], usage._sample

    def counted(gpus):
        taken.append(sample(gpus))
        if len(taken) == 3:
            three.set()
        return taken[-1]

    monkeypatch.setattr(usage, "_sample", counted)
    with usage.sampled(path, period_s=0.01):
        assert three.wait(30)
    frame = pl.read_parquet(path)
    assert frame.schema == pl.Schema(usage.SCHEMA)
    assert len(frame) == len(taken) >= 4  # one more at the end
    assert frame["time_s"].is_sorted()
    assert frame["cpu_pct"].is_between(0, 100).all()
    assert frame["memory_mb"].min() > 1


def test_an_error_keeps_the_samples_and_a_second_start_adds_to_them(tmp_path):
    path = tmp_path / "usage.parquet"
    with pytest.raises(ValueError), usage.sampled(path, period_s=60):
        raise ValueError
    assert len(pl.read_parquet(path)) == 1
    with usage.sampled(path, period_s=60):
        pass
    assert len(pl.read_parquet(path)) == 2


def test_energy_is_power_over_time_of_all_gpus_but_not_between_two_starts():
    gpu = {"gpu": 0, "use_pct": 50.0, "memory_mb": 1000.0}
    rows = [
        {"time_s": time_s, "cpu_pct": 1.0, "memory_mb": 1.0, "memory_pct": 1.0,
         "gpus": [gpu | {"power_w": watts}, gpu | {"gpu": 1, "power_w": None}]}
        for time_s, watts in ((0.0, 999.0), (10.0, 360.0), (20.0, 720.0), (9000.0, 999.0))
    ]  # fmt: skip
    assert usage.energy_wh(pl.DataFrame(rows, schema=usage.SCHEMA)) == pytest.approx((3600 + 7200) / 3600)
    none = [row | {"gpus": []} for row in rows]
    assert usage.energy_wh(pl.DataFrame(none, schema=usage.SCHEMA)) is None


def test_a_machine_without_gpus_has_none(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)  # as where it is not installed
    assert usage.Gpus().read() == []
