"""The predictor stage: fit the models to a profile and measure their error on what was left out of the fit.

Left out are shapes of the profile, in turn, and the whole generations that it holds.
"""

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
from rich.console import Console
from rich.table import Table

from pat.predictor import Predictor
from pat.predictor.figure import draw
from pat.predictor.latency import DecodeModel, PrefillModel, decode_shapes, prefill_shapes
from pat.predictor.switching import SwitchModel, switch_shapes

FOLDS = 4
PAIR = ["tp_from", "tp_to", "mode"]


def run(profile_dir: Path, out_dir: Path) -> None:
    """Read {decode,prefill,switch}.parquet of `profile_dir`, write model.json, errors.json and fit.png.

    generation.parquet is read too, if the profile has it: errors.json then has a part of that name.
    FileNotFoundError naming the file that is missing, ValueError naming the one that is empty.
    """
    samples = {name: _read(profile_dir / f"{name}.parquet") for name in ("decode", "prefill", "switch")}
    predictor = Predictor(
        DecodeModel.fit(samples["decode"]),
        PrefillModel.fit(samples["prefill"]),
        SwitchModel.fit(samples["switch"]),
    )
    held_out = cross_validate(samples)
    trace = profile_dir / "generation.parquet"
    if trace.exists() and len(steps := pl.read_parquet(trace)):
        held_out["generation"] = generation_errors(predictor.decode, steps)
    errors = {name: summarise(rows) for name, rows in held_out.items()}
    out_dir.mkdir(parents=True, exist_ok=True)
    predictor.save(out_dir / "model.json")
    (out_dir / "errors.json").write_text(json.dumps(errors, indent=1) + "\n", encoding="utf-8")
    draw(predictor, samples, held_out).savefig(out_dir / "fit.png", dpi=150)
    Console().print(_table(errors))


def cross_validate(samples: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """Held-out errors by model: rows (group, seconds, predicted_s, error_pct), one a shape.

    group is the tp, or "FROM->TO" for switches.  Every shape is predicted once, by a fit to the shapes of the
    other folds.  Folds run diagonally through the grid of shapes, so that a fold leaves every batch and every
    context in the fit.  Prefill shapes that were seen once are fitted, but judged only where no shape was seen
    more often: one step is no measure of anything.  A shape that is alone with its tp (or switch) cannot be held
    out and is left out.
    """
    decode = decode_shapes(samples["decode"]).with_columns(_diagonal("batch", "bucket"))
    prefill = prefill_shapes(samples["prefill"]).with_columns(_diagonal("requests", "tokens", "prefix"))
    switch = switch_shapes(samples["switch"])
    switch = switch.with_columns((pl.int_range(pl.len()).over("tp_from", "tp_to") % FOLDS).alias("fold"))
    judged = (pl.col("steps") > 1) | (pl.col("steps").max().over("tp") == 1)
    return {
        "decode": _held_out(decode, ["tp"], "seconds", DecodeModel.fit, ["tp", "batch", "context"]),
        "prefill": _held_out(
            prefill, ["tp"], "seconds", PrefillModel.fit, ["tp", "requests", "tokens", "prefix"], judged
        ),
        "switch": _held_out(
            switch, PAIR, "total_s", SwitchModel.fit, ["tp_from", "tp_to", "requests", "kv_tokens", "mode"]
        ),
    }


def generation_errors(model: DecodeModel, steps: pl.DataFrame) -> pl.DataFrame:
    """Errors of `model` on the decode steps (tp, batch, context, seconds) of generations that it was not fitted to.

    Rows as of `cross_validate`, one a shape that they went through: the median of its steps against the prediction.
    Shapes of a tp that the model lacks are left out.
    """
    shapes = decode_shapes(steps).filter(pl.col("tp").is_in(model.tp_sizes))
    predicted = [float(model.seconds(*row)) for row in shapes.select("tp", "batch", "context").rows()]
    return shapes.with_columns(pl.Series("predicted_s", predicted, pl.Float64)).select(
        pl.col("tp").cast(pl.String).alias("group"),
        "seconds",
        "predicted_s",
        ((pl.col("predicted_s") / pl.col("seconds") - 1) * 100).alias("error_pct"),
    )


def summarise(rows: pl.DataFrame) -> dict[str, dict[str, float | int | None]]:
    """{group: {median_abs_pct, p90_abs_pct, n}}; null errors where nothing could be held out."""
    error = pl.col("error_pct").abs()
    summary = rows.group_by("group", maintain_order=True).agg(
        error.median().alias("median_abs_pct"),
        error.quantile(0.9, "linear").alias("p90_abs_pct"),
        error.count().alias("n"),
    )
    return {row.pop("group"): row for row in summary.to_dicts()}


def _diagonal(*axes: str) -> pl.Expr:
    ranks = [pl.col(axis).rank("dense").over("tp").cast(pl.Int64) for axis in axes]
    return (pl.sum_horizontal(ranks) % FOLDS).alias("fold")


def _held_out(
    shapes: pl.DataFrame,
    key: list[str],
    target: str,
    fit: Callable[[pl.DataFrame], object],
    arguments: list[str],
    judged: pl.Expr | bool = True,
) -> pl.DataFrame:
    parts = []
    shapes = shapes.with_columns(judged=judged)
    for fold in range(FOLDS):
        rest = shapes.filter(pl.col("fold") != fold)
        test = shapes.filter(pl.col("fold") == fold, pl.col("judged"))
        known = test.join(rest, on=key, how="semi")
        alone = test.join(rest, on=key, how="anti").with_columns(pl.lit(None, pl.Float64).alias("predicted_s"))
        model = fit(rest) if known.height else None
        predicted = [float(model.seconds(*row)) for row in known.select(arguments).rows()]
        parts += [known.with_columns(pl.Series("predicted_s", predicted, pl.Float64)), alone]
    group = pl.col("tp").cast(pl.String) if key == ["tp"] else pl.format("{}->{}", "tp_from", "tp_to")
    error = (pl.col("predicted_s") / pl.col(target) - 1) * 100
    rows = pl.concat(parts).sort(*key)
    return rows.select(group.alias("group"), pl.col(target).alias("seconds"), "predicted_s", error.alias("error_pct"))


def _read(path: Path) -> pl.DataFrame:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run the profile stage first")
    samples = pl.read_parquet(path)
    if samples.is_empty():
        raise ValueError(f"{path} has no rows: run the profile stage again")
    return samples


def _table(errors: dict[str, dict[str, dict]]) -> Table:
    table = Table(title="Predictor: error on what was left out of the fit")
    for heading in ("model", "tp", "median", "90 %", "shapes"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, groups in errors.items():
        for group, error in groups.items():
            shown = ["-" if error[k] is None else f"{error[k]:.1f} %" for k in ("median_abs_pct", "p90_abs_pct")]
            table.add_row(name, group, *shown, str(error["n"]))
    return table
