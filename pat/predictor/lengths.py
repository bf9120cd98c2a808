"""How many tokens a live request will still generate, learnt from the responses of earlier iterations."""

from collections.abc import Sequence

import numpy as np
from scipy.special import log_ndtr

# Before any response is seen: lognormal, its median a quarter of the cap; the cap cuts 8 %.
PRIOR_MEDIAN = 0.25
PRIOR_SIGMA = 1.0


class LengthModel:
    """Discrete survival function of response lengths; a response cut by the cap is a censored observation.

    The hazard at t tokens (the chance that a response of at least t tokens ends there) is the Kaplan-Meier
    ratio of ends to responses at risk, with `prior_weight` pseudo-responses added that follow the prior (the
    posterior mean under a beta process: Hjort, Annals of Statistics 18(3), 1990).  Where there is data it is
    Kaplan-Meier, beyond the longest response it follows the prior.  Each call of `observe` first multiplies
    the weight of what was seen before by `decay`, because training shifts the lengths.
    """

    def __init__(self, prior_weight: float = 4.0, decay: float = 0.9):
        self.prior_weight = prior_weight
        self.decay = decay
        self._ended = np.zeros(1)  # (longest + 1,) weight of the responses that ended at each length
        self._cut = np.zeros(1)  # (longest + 1,) weight of those censored there
        self._log_survival: dict[int, np.ndarray] = {}  # by cap

    def observe(self, lengths: Sequence[int], finished: Sequence[bool]) -> None:
        """Learn one iteration: generated tokens of each response; finished is False where the cap cut it."""
        tokens, ended = np.maximum(np.asarray(lengths, int), 1), np.asarray(finished, bool)
        if tokens.shape != ended.shape:
            raise ValueError(f"{len(tokens)} lengths but {len(ended)} finished flags")
        if len(tokens) == 0:
            return
        size = max(int(tokens.max()) + 1, len(self._ended))
        self._ended, self._cut = (
            self.decay * np.pad(old, (0, size - len(old))) + np.bincount(tokens[new], minlength=size)
            for old, new in ((self._ended, ended), (self._cut, ~ended))
        )
        self._log_survival.clear()

    def survival(self, cap: int) -> np.ndarray:
        """P(length > t) for t = 0..cap tokens, (cap + 1,), as if there were no cap."""
        return np.exp(self._log(cap))

    def remaining(self, generated: np.ndarray, cap: int, draws: np.ndarray) -> np.ndarray:
        """Remaining tokens of requests still alive after `generated` tokens, (draws, live) ints in 1..cap.

        generated: (live,).  draws: (draws, live) in (0, 1), the probability of an even longer response, so
        equal draws give comparable scenarios.  No response exceeds `cap` tokens; one that has reached it
        counts as having one token left.
        """
        log_survival = self._log(cap)
        now = np.clip(np.asarray(generated, int), 0, cap - 1)
        with np.errstate(divide="ignore"):
            target = log_survival[now] + np.log(draws)
        total = np.searchsorted(-log_survival, -target, side="left")
        return np.clip(total, now + 1, cap) - now

    def _log(self, cap: int) -> np.ndarray:
        if cap not in self._log_survival:
            self._log_survival[cap] = self._fit(cap)
        return self._log_survival[cap]

    def _fit(self, cap: int) -> np.ndarray:
        """Log survival at t = 0..cap."""
        t = np.arange(1, cap + 1)
        prior = np.exp(np.r_[0.0, log_ndtr(-np.log(t / (PRIOR_MEDIAN * cap)) / PRIOR_SIGMA)])
        at_risk = np.cumsum((self._ended + self._cut)[::-1])[::-1]
        ended, at_risk = (np.pad(x, (0, max(cap + 1 - len(x), 0)))[1 : cap + 1] for x in (self._ended, at_risk))
        ends = self.prior_weight * (prior[:-1] - prior[1:]) + ended
        risk = self.prior_weight * prior[:-1] + at_risk
        with np.errstate(divide="ignore"):  # a hazard of 1, without a prior, ends the curve
            hazard = np.divide(ends, risk, out=np.zeros(cap), where=risk > 0)
            return np.r_[0.0, np.cumsum(np.log1p(-np.minimum(hazard, 1.0)))]
