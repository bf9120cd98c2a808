"""fit.png: measured steps and switches against the fitted models, and the held-out errors."""

import numpy as np
import polars as pl
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from pat.predictor import Predictor
from pat.predictor.latency import decode_shapes, prefill_shapes
from pat.predictor.switching import MODES, switch_shapes

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = dict(zip(MODES, ("o", "^"), strict=True))
MAX_CONTEXTS = 5  # curves a decode panel


def draw(predictor: Predictor, samples: dict[str, pl.DataFrame], held_out: dict[str, pl.DataFrame]) -> Figure:
    """Upper row: decode steps, one panel a tp.  Lower row: prefill, switches, held-out errors.

    samples: the profile's tables by name.  held_out: rows (group, error_pct) by name.
    """
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    upper, lower = figure.subfigures(2, 1)
    tp_sizes = predictor.decode.tp_sizes
    shapes = decode_shapes(samples["decode"])
    panels = upper.subplots(1, len(tp_sizes), sharey=True, squeeze=False)[0]
    for tp, axes in zip(tp_sizes, panels, strict=True):
        _decode(axes, predictor, tp, shapes.filter(tp=tp))
    panels[0].set_ylabel("decode step, ms")
    prefill, switch, errors = lower.subplots(1, 3, width_ratios=(1, 1, 1.2))
    _prefill(prefill, predictor, prefill_shapes(samples["prefill"]))
    _switch(switch, predictor, switch_shapes(samples["switch"]))
    _errors(errors, held_out)
    for axes in (*panels, prefill, switch, errors):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _decode(axes: Axes, predictor: Predictor, tp: int, shapes: pl.DataFrame) -> None:
    buckets = shapes["bucket"].unique().sort().to_list()
    chosen = [buckets[i] for i in np.unique(np.linspace(0, len(buckets) - 1, MAX_CONTEXTS).round().astype(int))]
    colors = colormaps["viridis"](np.linspace(0.0, 0.85, len(chosen)))
    batch = np.linspace(shapes["batch"].min(), shapes["batch"].max(), 200)
    for bucket, color in zip(chosen, colors, strict=True):
        points = shapes.filter(bucket=bucket)
        context = float((points["context"] / points["batch"]).median())
        axes.plot(batch, 1e3 * predictor.decode.seconds(tp, batch, batch * context), color=color)
        label = f"{context:.0f} tokens"
        axes.scatter(points["batch"], 1e3 * points["seconds"], color=color, s=28, label=label, zorder=3)
    axes.set(title=f"Decode, tp {tp}", xlabel="live requests of a replica", ylim=(0, None))
    axes.legend(loc="upper left", title="context a request", fontsize=8, title_fontsize=8, frameon=False)


def _prefill(axes: Axes, predictor: Predictor, shapes: pl.DataFrame) -> None:
    fresh = shapes.filter(pl.col("prefix") == 0)
    for tp, color in zip(predictor.prefill.tp_sizes, COLORS, strict=False):
        for (requests,), points in fresh.filter(tp=tp).group_by("requests", maintain_order=True):
            tokens = np.linspace(points["tokens"].min(), points["tokens"].max(), 200)
            axes.plot(tokens, 1e3 * predictor.prefill.seconds(tp, requests, tokens, 0), color=color, alpha=0.7)
            axes.scatter(points["tokens"], 1e3 * points["seconds"], color=color, s=28, zorder=3)
        axes.plot([], [], color=color, marker="o", label=f"tp {tp}")
    axes.set(title="Prefill", xlabel="new tokens of a step", ylabel="step, ms", ylim=(0, None))
    axes.legend(fontsize=8, frameon=False)


def _switch(axes: Axes, predictor: Predictor, shapes: pl.DataFrame) -> None:
    pairs = shapes.select("tp_from", "tp_to").unique(maintain_order=True).rows()
    highest = 0.0
    for pair, color in zip(pairs, COLORS * len(pairs), strict=False):
        for mode, marker in MARKERS.items():
            points = shapes.filter(tp_from=pair[0], tp_to=pair[1], mode=mode)
            if points.is_empty():
                continue
            fitted = predictor.switch.seconds(
                *pair, points["requests"].to_numpy(), points["kv_tokens"].to_numpy(), mode
            )
            label = f"{pair[0]} to {pair[1]}, {mode}"
            axes.scatter(1e3 * points["total_s"], 1e3 * fitted, color=color, marker=marker, s=32, label=label, zorder=3)
            highest = max(highest, 1e3 * fitted.max(), 1e3 * points["total_s"].max())
    axes.plot([0, 1.05 * highest], [0, 1.05 * highest], color="0.6", lw=1, ls="--")
    axes.set(title="Switch", xlabel="measured, ms", ylabel="fitted, ms", xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize=8, frameon=False)


def _errors(axes: Axes, held_out: dict[str, pl.DataFrame]) -> None:
    labels, values, colors = [], [], []
    for (name, rows), color in zip(held_out.items(), COLORS, strict=False):
        for (group,), part in rows.drop_nulls("error_pct").group_by("group", maintain_order=True):
            labels.append(f"{name} {group}" if "->" in group else f"{name} tp {group}")
            values.append(part["error_pct"].to_numpy())
            colors.append(color)
    axes.axvspan(-5, 5, color="0.92", zorder=0)
    axes.axvline(0, color="0.6", lw=1, zorder=1)
    for y, (errors, color) in enumerate(zip(values, colors, strict=True)):
        spread = np.linspace(-0.2, 0.2, len(errors)) if len(errors) > 1 else np.zeros(1)
        axes.scatter(errors, y + spread, color=color, s=20, alpha=0.7, zorder=3)
        axes.plot([np.median(errors)] * 2, [y - 0.35, y + 0.35], color="black", lw=1.5, zorder=4)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=10)
    axes.margins(x=0.1)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set(title="Error on held-out shapes", xlabel="error, % (band: 5 %, bar: median)")
