"""The arms that a training can run under, by name, and the policy of each."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pat.policy import Mode, Policy, Static, Threshold

MODES: tuple[Mode, ...] = get_args(Mode)
_THRESHOLD = re.compile(r"threshold([1-9]\d*)")


def allowed(tp_sizes: Iterable[int]) -> str:
    """The names of arms, for people."""
    return ", ".join((*(f"tp{tp}" for tp in sorted(tp_sizes)), "thresholdN (N: a number of requests)", "pat"))


def known(arm: str, tp_sizes: Iterable[int]) -> bool:
    return arm == "pat" or arm in {f"tp{tp}" for tp in tp_sizes} or bool(_THRESHOLD.fullmatch(arm))


def from_config(arm: str, tp_sizes: Sequence[int], policy_cfg: Mapping[str, Any], predictor: Path | None) -> Policy:
    """The policy of an arm. "tpK" stays at K, which is one of tp_sizes. "thresholdN" goes from the least size to
    the largest once at most N requests of a server are unfinished. "pat" predicts.

    policy_cfg: margin, max_switch_share, max_switches, kv.  predictor: file that `pat predictor` wrote; only
    "pat" needs it.  ValueError naming the arm and what is allowed.
    """
    kv = policy_cfg["kv"]
    if kv not in ("auto", *MODES):
        raise ValueError(f"policy.kv is {kv!r}: allowed are auto, {', '.join(MODES)}")
    if not known(arm, tp_sizes):
        raise ValueError(f"unknown arm {arm!r}: allowed are {allowed(tp_sizes)}")
    simple: Mode = "migrate" if kv == "auto" else kv
    if found := _THRESHOLD.fullmatch(arm):
        return Threshold(max(tp_sizes), int(found[1]), kv=simple)
    if arm != "pat":
        return Static(int(arm.removeprefix("tp")), kv=simple)
    if predictor is None:
        raise ValueError(
            "arm 'pat' needs a predictor: run the predictor stage first; in a verl job of your own set "
            "actor_rollout_ref.rollout.custom.pat.predictor to the model.json that it wrote"
        )
    # Here, since predicting takes SciPy, which a file of settings is checked without.
    from pat.predictive import Predictive
    from pat.predictor import Predictor
    from pat.predictor.lengths import LengthModel

    limits = {key: policy_cfg[key] for key in ("margin", "max_switch_share", "max_switches")}
    return Predictive(Predictor.load(predictor), LengthModel(), tp_sizes, kv=kv, **limits)
