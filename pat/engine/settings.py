"""What every process of one PAT engine must agree on; travels to SGLang's processes in one environment variable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "PAT_ENGINE"


@dataclass(frozen=True)
class Settings:
    """One engine: its ranks, the sizes it may take, and where its processes meet.

    init_method: rendezvous of the ranks' world, ``tcp://host:port``
    directory: shared-memory directory of this engine (board, mailboxes)
    deadline_s: longest that any phase of a switch or any collective may take, seconds
    """

    ranks: int
    tp_sizes: tuple[int, ...]
    init_method: str
    directory: str
    deadline_s: float

    @property
    def switch_deadline_s(self) -> float:
        """Longest that a whole switch may take, waiting for the end of a step included, seconds."""
        return 7 * self.deadline_s

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
