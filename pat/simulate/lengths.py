"""Response lengths to simulate: lognormal, uniform, a list, or what a file says."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl

Draw = Callable[[np.random.Generator, int], np.ndarray]  # how many -> tokens of each, floats, not yet cut
# The longest response where the default lognormal holds (PAT's workload, arXiv 2605.23945), tokens.
FITTED_CAP = 24576


def lognormal(mu: float, sigma: float) -> Draw:
    """exp(Normal(mu, sigma)) tokens."""
    return lambda rng, count: rng.lognormal(mu, sigma, count)


def uniform(low: int, high: int) -> Draw:
    """Every length from `low` to `high` tokens equally often."""
    return lambda rng, count: rng.integers(low, high, count, endpoint=True).astype(float)


def listed(tokens: Sequence[int]) -> Draw:
    """The tokens as they are listed, cycled: nothing is random."""
    return lambda rng, count: np.resize(np.asarray(tokens, float), count)


def empirical(tokens: Sequence[int], probability: Sequence[float] | None = None) -> Draw:
    """Draws from `tokens`, each as often as its probability says (they are scaled to 1), or equally often."""
    values = np.asarray(tokens, float)
    weights = None if probability is None else np.asarray(probability, float) / np.sum(probability)
    return lambda rng, count: rng.choice(values, count, p=weights)


def read(path: Path) -> Draw:
    """The distribution in a file: Parquet with a column `length`, or CSV with `output_tokens` and `probability`.

    FileNotFoundError without it, ValueError when it has other columns, no rows or no positive probability.
    """
    columns = ("output_tokens", "probability") if path.suffix == ".csv" else ("length",)
    try:
        frame = pl.read_csv(path) if path.suffix == ".csv" else pl.read_parquet(path)
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if absent := [name for name in columns if name not in frame.columns]:
        raise ValueError(f"{path} lacks the columns {', '.join(absent)}")
    tokens, *probability = (frame[name].drop_nulls().to_numpy() for name in columns)
    if len(tokens) == 0 or (probability and not (probability[0].min() >= 0 and probability[0].sum() > 0)):
        raise ValueError(f"{path} has no lengths, or no probabilities")
    return empirical(tokens, *probability)


def from_config(lengths, replayed: Sequence[int] | None, cap: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Draws whole tokens in 1..cap by the section `simulate.lengths`; replayed: rollout.lengths, if set."""
    kind = lengths.kind or ("listed" if replayed else "lognormal")
    scale = lengths.scale or (cap / FITTED_CAP if kind == "lognormal" else 1.0)
    if kind == "lognormal":
        draw = lognormal(lengths.mu, lengths.sigma)
    elif kind == "uniform":
        draw = uniform(lengths.low, lengths.high or cap)
    elif kind == "listed":
        draw = listed(lengths.tokens or replayed)
    else:
        draw = read(Path(lengths.path))
    return lambda rng, count: cut(scale * draw(rng, count), cap)


def cut(tokens: np.ndarray, cap: int) -> np.ndarray:
    """Whole tokens, at least 1 and at most `cap`."""
    return np.clip(np.rint(tokens), 1, cap).astype(np.int64)
