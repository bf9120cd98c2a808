"""What every process of one PAT engine must agree on; travels to SGLang's processes in one environment variable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pat.model import ModelSpec

VARIABLE = "PAT_ENGINE"
KV_CHOICES = ("recompute", "migrate", "auto")  # what becomes of unfinished requests' KV; by number in a message

# What a machine about does, for a first guess of what KV costs: (bytes/s between two ranks, FLOP/s of a rank in
# prefill, seconds of bookkeeping a moved request). A profile of the machine knows better.
GPU = (50e9, 200e12, 2e-4)
CPU = (0.2e9, 50e9, 2e-3)


@dataclass(frozen=True)
class KvCosts:
    """What moving a request's KV and prefilling it again take, seconds a token in KV and seconds a request."""

    move_s_per_token: float
    move_s_per_request: float
    recompute_s_per_token: float
    recompute_s_per_request: float

    def moving_is_cheaper(self, tokens: int) -> bool:
        """Whether the KV of a request with ``tokens`` tokens in it should move."""
        move = self.move_s_per_request + tokens * self.move_s_per_token
        return move <= self.recompute_s_per_request + tokens * self.recompute_s_per_token

    @classmethod
    def guess(cls, model: ModelSpec, itemsize: int, accelerator: bool) -> KvCosts:
        """From the shape of a model whose numbers take ``itemsize`` bytes: KV over a link against FLOPs of a prefill.

        A token's prefill takes 2 FLOPs a weight of the layers. Good to an order of magnitude, which decides nearly
        all cases: a token of an 8B model moves in 3 us and is computed in 80.
        """
        bandwidth, flops, per_request = GPU if accelerator else CPU
        attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
        weights = model.layers * (attention + 3 * model.hidden * model.intermediate)
        return cls(
            move_s_per_token=model.kv_bytes_per_token(itemsize) / bandwidth,
            move_s_per_request=per_request,
            recompute_s_per_token=2 * weights / flops,
            recompute_s_per_request=0.0,  # a request to be prefilled is queued, nothing more
        )

    def to_message(self) -> dict[str, float]:
        return {f"pat_{key}": value for key, value in asdict(self).items()}

    @classmethod
    def from_message(cls, values: dict[str, float]) -> KvCosts:
        return cls(**{field.name: values[f"pat_{field.name}"] for field in fields(cls)})


@dataclass(frozen=True)
class Settings:
    """One engine: its ranks, the sizes it may take (ascending), and where its processes meet.

    directory: shared-memory directory of this engine (boards, mailboxes, where the ranks meet)
    deadline_s: longest that any phase of a switch or any collective may take, seconds
    graph_memory_bytes: device memory that the graphs and attention backends of one size may take; None: 5 % of it
    one_device: all ranks are on one device
    """

    ranks: int
    tp_sizes: tuple[int, ...]
    directory: str
    deadline_s: float
    graph_memory_bytes: int | None = None
    one_device: bool = False

    @property
    def base(self) -> int:
        """The smallest size: its shards are resident, and all other sizes are parts of them."""
        return self.tp_sizes[0]

    @property
    def agree_deadline_s(self) -> float:
        """Longest that ranks wait for each other to begin a switch, the step that one may be in included, seconds."""
        return 2 * self.deadline_s

    @property
    def switch_deadline_s(self) -> float:
        """Longest that a whole switch may take, waiting for the end of a step included, seconds."""
        return 7 * self.deadline_s

    @property
    def init_method(self) -> str:
        """Rendezvous of the ranks' world: a file, for which no port must be free; all ranks are of one machine."""
        return f"file://{self.directory}/meet"

    @property
    def path(self) -> Path:
        return Path(self.directory)

    def to_environment(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Settings | None:
        """The settings of the engine that started this process, or None outside of one."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        values = json.loads(text)
        return cls(**values | {"tp_sizes": tuple(values["tp_sizes"])})
