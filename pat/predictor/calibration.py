"""Whether the length model can be believed: the share of responses predicted to survive, against what came."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import polars as pl

from pat.predictor.lengths import LengthModel

POINTS = 64  # most numbers of tokens at which the curves are compared
SCHEMA = {
    "iteration": pl.Int64,
    "tokens": pl.Int64,
    "predicted": pl.Float64,
    "observed": pl.Float64,
    "responses": pl.Int64,
}


class Gap(NamedTuple):
    """Absolute differences of predicted and observed shares (0..1), all iterations' responses taken together."""

    mean: float
    largest: float


def calibrate(
    responses: pl.DataFrame, cap: int, alive_at: int = 0, make: Callable[[], LengthModel] = LengthModel
) -> pl.DataFrame:
    """Survivors of each iteration, from the second one on, as the iterations before it predict them.

    responses: rows (iteration, response_tokens, finish_reason), one a response; "length" is the reason of one that
    the cap cut. cap: most new tokens of a response. alive_at: only the responses longer than this count, and the
    prediction is conditional on that, as the policy's are in the middle of a generation. make: a model that has
    seen nothing.

    Returns rows (iteration, tokens, predicted, observed, responses) at up to POINTS numbers of tokens from alive_at
    to cap - 1: the shares of the responses that are longer, and how many there were. None for an iteration without a
    response that is alive then. ValueError unless 0 <= alive_at < cap.
    """
    if not 0 <= alive_at < cap:
        raise ValueError(f"alive_at is {alive_at}: allowed is 0 to cap - 1 = {cap - 1}")
    tokens = np.unique(np.linspace(alive_at, cap - 1, min(POINTS, cap - alive_at)).round().astype(int))
    model, rows = make(), []
    for position, ((iteration,), part) in enumerate(
        responses.sort("iteration").group_by("iteration", maintain_order=True)
    ):
        lengths = part["response_tokens"].to_numpy()
        alive = lengths[lengths > alive_at]
        if position and len(alive):
            survival = model.survival(cap)
            rows.append(
                pl.DataFrame(
                    {
                        "iteration": np.full(len(tokens), iteration),
                        "tokens": tokens,
                        "predicted": survival[tokens] / survival[alive_at],
                        "observed": (alive[:, None] > tokens).mean(axis=0),
                        "responses": np.full(len(tokens), len(alive)),
                    },
                    schema=SCHEMA,
                )
            )
        model.observe(lengths, (part["finish_reason"] != "length").to_numpy())
    return pl.concat(rows) if rows else pl.DataFrame(schema=SCHEMA)


def gap(calibration: pl.DataFrame) -> Gap | None:
    """How far prediction and observation are apart over what `calibrate` returned; None if that is empty.

    Each iteration counts by its responses. A correct model, too, misses the share of n responses by up to
    1.36 / sqrt(n) at its largest in 95 % of the cases (Kolmogorov's distribution).
    """
    if calibration.is_empty():
        return None
    weight = pl.col("responses")
    pooled = calibration.group_by("tokens").agg(
        (((pl.col("predicted") - pl.col("observed")) * weight).sum() / weight.sum()).abs().alias("difference")
    )
    return Gap(float(pooled["difference"].mean()), float(pooled["difference"].max()))
