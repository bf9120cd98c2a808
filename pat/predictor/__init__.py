"""What the policy knows about a machine: latency of a step and cost of a switch, fitted to its profile."""

import json
from dataclasses import dataclass
from pathlib import Path

from pat.predictor.latency import DecodeModel, PrefillModel
from pat.predictor.regression import Curve, Surface
from pat.predictor.switching import SwitchCost, SwitchModel

FORMAT = 2


@dataclass(frozen=True)
class Predictor:
    decode: DecodeModel
    prefill: PrefillModel
    switch: SwitchModel

    def save(self, path: Path) -> None:
        """Write `path` (JSON): curves as [knots, values], surfaces as [knots, knots, values], in tokens or requests and
        seconds.
        """
        model = {
            "format": FORMAT,
            "decode": {
                str(tp): {"batch": _pack(curve), "context": _pack(self.decode.by_context[tp])}
                | ({"both": [*vars(surface).values()]} if (surface := self.decode.by_both.get(tp)) else {})
                | ({"tiles": tiles} if (tiles := self.decode.tiles.get(tp)) else {})
                for tp, curve in self.decode.by_batch.items()
            },
            "prefill": {
                str(tp): {"tokens": _pack(curve), "rates": self.prefill.rates[tp]}
                | ({"length": _pack(length)} if (length := self.prefill.by_length.get(tp)) else {})
                for tp, curve in self.prefill.by_tokens.items()
            },
            "switch": [[*pair, *cost] for pair, cost in sorted(self.switch.costs.items())],
        }
        path.write_text(json.dumps(model, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Predictor":
        """Read what `save` wrote.  FileNotFoundError without it, ValueError when it is something else."""
        try:
            model = json.loads(path.read_text(encoding="utf-8"))
            if model["format"] != FORMAT:
                raise ValueError(f"format {model['format']}")
            decode = {int(tp): (_curve(c["batch"]), _curve(c["context"])) for tp, c in model["decode"].items()}
            both = {int(tp): _surface(*c["both"]) for tp, c in model["decode"].items() if "both" in c}
            tiles = {
                int(tp): {int(batch): s for batch, s in c["tiles"].items()}
                for tp, c in model["decode"].items()
                if "tiles" in c
            }
            prefill = {int(tp): (_curve(c["tokens"]), tuple(c["rates"])) for tp, c in model["prefill"].items()}
            length = {int(tp): _curve(c["length"]) for tp, c in model["prefill"].items() if "length" in c}
            switch = {(a, b, mode): SwitchCost(*cost) for a, b, mode, *cost in model["switch"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a predictor of format {FORMAT}: {error!r}; run `pat predictor` again"
            ) from error
        return cls(
            DecodeModel({tp: c[0] for tp, c in decode.items()}, {tp: c[1] for tp, c in decode.items()}, both, tiles),
            PrefillModel({tp: c[0] for tp, c in prefill.items()}, {tp: c[1] for tp, c in prefill.items()}, length),
            SwitchModel(switch),
        )


def _pack(curve: Curve) -> list:
    return [curve.knots, curve.values]


def _curve(packed: list) -> Curve:
    knots, values = packed
    return Curve(tuple(knots), tuple(values))


def _surface(x_knots: list, y_knots: list, values: list) -> Surface:
    return Surface(tuple(x_knots), tuple(y_knots), tuple(map(tuple, values)))
