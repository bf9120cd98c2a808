"""What of the machine counts: for the stage hardware all that it lists, for what is timed its kind of GPUs (pure)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

GIB = 1 << 30
HERE, SLURM = "this machine", "Slurm"  # who told


def of(facts: Mapping[str, Any], partition: str | None, gpu_type: str | None) -> dict[str, dict]:
    """``nodes`` for the stage hardware and ``timed`` for profile and training, from `pat.cluster.discover`.

    Of a cluster only the types of GPUs count for what is timed, in ``partition`` and of ``gpu_type`` where these are
    given: a node more or less trains nothing again. Numbers that a reboot changes are rounded, and names that a
    container changes are left out.
    """
    nodes = [
        node | {"memory_bytes": f"{node['memory_bytes'] / GIB:.0f} GiB", "devices": list(map(_named, node["devices"]))}
        for node in facts["nodes"]
    ]
    if facts["source"] == "local":
        (node,) = nodes
        gpus = sorted(set(node["devices"]))
        timed = {"gpus": gpus, "driver": node["driver"]}
        if not gpus:
            timed = {"cpu": facts["cpu_model"], "cores": os.cpu_count()}
        same = {key: value for key, value in _but_name(node).items() if key != "links"}
        return {
            "nodes": {"source": HERE, "cpu": facts["cpu_model"], **same},
            "timed": {"source": HERE, **timed},
        }
    asked = set((partition or "").split(",")) - {""}
    inside = [node for node in nodes if not asked or asked & set(node["partitions"])]
    kinds = {device for node in inside for device in node["devices"]}
    kinds &= {gpu_type} if gpu_type else kinds
    return {
        "nodes": {"source": SLURM, **{node["name"]: _but_name(node) for node in nodes}},
        "timed": {"source": SLURM, "gpus": sorted(kinds)},
    }


def standing(before: Mapping[str, Any], now: Mapping[str, Any], unheard: str | None) -> Mapping[str, Any]:
    """``now``, or ``before`` where what told that does not answer at present: a moment's silence trains nothing again.

    Both are a part of `of` ({}: not known). unheard: of `pat.cluster.unheard`.
    """
    silent = unheard is not None and (unheard != SLURM or before.get("source") == SLURM)
    return before if before and silent else now


def _named(device: Mapping[str, Any]) -> str:
    """A GPU as "NVIDIA H200 140 GiB"; Slurm knows its type alone."""
    return device["name"] + (f" {device['memory_bytes'] / GIB:.0f} GiB" if device["memory_bytes"] else "")


def _but_name(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "name"}
