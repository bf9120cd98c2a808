"""What `pat gpu-check` writes: one JSON file that says all there is to say about a machine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Machine(_Strict):
    """links: what `nvidia-smi topo -m` prints. versions: of packages, None where one is not installed."""

    cpu: str
    gpus: list[str]
    driver: str | None
    cuda: str | None
    links: str | None
    versions: dict[str, str | None]


class Test(_Strict):
    name: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float
    message: str = ""


class Decode(_Strict):
    """Decode steps of one replica; ``stock``: SGLang's own engine at this size.

    step_ms: milliseconds a step in each repeat, in order; below 0 is noise that is larger than what was measured.
    """

    engine: Literal["pat", "stock"]
    tp: int
    batch: int
    step_ms: list[float]


class Switch(_Strict):
    """One switch with requests in flight, seconds; ``phases``: by name."""

    tp_from: int
    tp_to: int
    kv: str
    unfinished: int
    total_s: float
    phases: dict[str, float]


class Part(_Strict):
    """One part of the check; ``why`` it failed or was not run."""

    name: str
    outcome: Literal["done", "failed", "not run"]
    seconds: float = 0.0
    why: str = ""


class Report(_Strict):
    """ok: no part and no test failed. one_device: all ranks were on one GPU, so tp above 1 says nothing of speed."""

    ok: bool
    device: Literal["cuda", "cpu"]
    one_device: bool
    model: dict
    machine: Machine
    parts: list[Part]
    tests: list[Test]
    decode: list[Decode]
    switches: list[Switch]
    graph_memory_bytes: dict[int, int]
