"""Whether decode steps take as long as predicted, and predictions corrected by what is seen."""

import logging
from collections import deque

import numpy as np

from pat.predictor.latency import DecodeModel

log = logging.getLogger(__name__)

WINDOW = 256  # latest steps of a tp that count
ENOUGH = 16  # steps of a tp that tell something
FARTHEST = 3.0  # a median further from the prediction than this factor is no drift but another machine, or model
WIDEST = 2.0  # third quartile over first: what varies so much is not a matter of scale


class DriftGuard:
    """A decode model scaled by realised over predicted step times, tp by tp; the latest WINDOW steps count.

    A tp that has not been seen is taken to be off as those are that have (their geometric mean): what slows one
    down, such as other work on the machine or hotter chips, mostly slows all.  `trusted` is False, and a warning is
    logged, while what is seen can't be put right by a scale; it becomes True again when it can.
    """

    def __init__(self, decode: DecodeModel):
        self.decode = decode
        self.trusted = True
        self._ratios: dict[int, deque[float]] = {}
        self._scales: dict[int, float] = {}
        self._common = 1.0

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        return self.decode.tp_sizes

    @property
    def scales(self) -> dict[int, float]:
        """Realised over predicted, of every tp that has been seen enough."""
        return dict(self._scales)

    def seconds(self, tp: int, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        """As `DecodeModel.seconds`, corrected."""
        return self.decode.seconds(tp, batch, context) * self._scales.get(tp, self._common)

    def observe(self, tp: int, batch: np.ndarray, context: np.ndarray, seconds: np.ndarray) -> None:
        """Decode steps of one replica each: (n,) live requests, their tokens in KV, seconds."""
        if tp not in self.decode.tp_sizes or not len(batch):
            return
        ratios = self._ratios.setdefault(tp, deque(maxlen=WINDOW))
        ratios.extend((np.asarray(seconds) / self.decode.seconds(tp, np.asarray(batch), np.asarray(context))).tolist())
        if len(ratios) < ENOUGH:
            return
        low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        self._scales[tp] = float(median)
        self._common = float(np.exp(np.mean(np.log(list(self._scales.values())))))
        trusted = bool(1 / FARTHEST <= median <= FARTHEST and high <= WIDEST * low)
        if self.trusted and not trusted:
            log.warning(
                "PAT: decode steps at tp %d take %.2f times as long as predicted (quartiles %.2f to %.2f): staying at "
                "one size; make the profile again on this machine, without other work on it",
                *(tp, median, low, high),
            )
        self.trusted = trusted
