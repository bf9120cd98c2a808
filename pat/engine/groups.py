"""Communicators of every tensor-parallel size, made once at start-up and swapped at a switch.

All ranks of a node join one world of N. SGLang's data-parallel replicas normally know nothing of each other; here
each scheduler process is started as a rank of a replica of the base size and also holds the groups of wider sizes.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from pat.engine import sglang_api as sg
from pat.engine.device import device_of
from pat.engine.settings import Settings
from pat.layout import Layout

# Group handles of SGLang's parallel context that follow the tensor-parallel size.
TP_GROUPS = ("world_group", "tp_group", "attn_tp_group", "moe_tp_group")
# Longest that ranks wait for each other while they start, seconds: one may get its weights minutes after another.
START_S = 1800.0
# Groups that stay of one rank at every size that PAT supports.
SINGLE_GROUPS = ("moe_ep_group", "moe_dp_group", "attn_cp_group")


def widths(layout: Layout, rank: int) -> dict[str, int]:
    """Sizes and ranks that SGLang derives from tp, for the parallel context of ``rank``."""
    names = ("tp", "attn_tp", "moe_tp")
    return {f"{name}_size": layout.tp for name in names} | {f"{name}_rank": layout.tp_rank(rank) for name in names}


class Groups:
    """The world of N ranks and, for each tp, what the parallel context must say."""

    def __init__(self, settings: Settings, rank: int, backend: str, device_name: str, gpu_id: int) -> None:
        sg.init_distributed_environment(
            backend=backend,
            world_size=settings.ranks,
            rank=rank,
            local_rank=gpu_id,
            distributed_init_method=settings.init_method,
            timeout=int(max(START_S, settings.deadline_s)),  # also of SGLang's device groups, until `started`
        )
        self.rank, device = rank, device_of(device_name)
        self.topology: dict[int, dict] = {}
        parallel = sg.get_parallel()
        with parallel.override(**widths(Layout(settings.ranks, settings.ranks), rank)):
            sg.initialize_model_parallel()  # SGLang's own builder, once, at the full width
        built = {name: parallel._stamp[name] for name in TP_GROUPS + SINGLE_GROUPS if name in parallel._stamp}
        self.world = built["tp_group"]
        # Where ranks meet while they start. A process that ends meanwhile is seen by the engine's watch.
        self.start = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(START_S, settings.deadline_s)))
        # SGLang gives its own CPU groups two hours; a rank that is gone must be noticed within the deadline.
        self.votes = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.deadline_s))
        self.first_votes = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.agree_deadline_s))
        for tp in settings.tp_sizes:
            layout = Layout(settings.ranks, tp)
            group = (
                self.world
                if tp == settings.ranks
                else sg.init_model_parallel_group(
                    [list(ranks) for ranks in layout.replicas], gpu_id, backend, group_name="tp"
                )
            )
            follow = {name: group for name in TP_GROUPS if name in built}
            single = {name: built[name] for name in SINGLE_GROUPS if name in built and built[name].world_size == 1}
            self.topology[tp] = widths(layout, rank) | follow | single
        # Now, so that what NCCL takes is known when SGLang sizes the KV pool, and no switch waits for it.
        for group in self.all():
            device.connect(group.device_group)

    def started(self, deadline_s: float) -> None:
        """All ranks are ready: from now on torch's collectives on the devices take at most ``deadline_s``.

        The exchange of KV is one. Custom all-reduce and what is in CUDA graphs is not torch's, and has no deadline.
        """
        for group in self.all():
            sg.set_group_timeout(timedelta(seconds=deadline_s), group.device_group)

    def all(self) -> list:
        """The groups that this rank is in, each once."""
        return list({id(group): group for group in (self.world, *map(self.tp_group, self.topology))}.values())

    def tp_group(self, tp: int):
        return self.topology[tp]["tp_group"]

    def apply(self, tp: int) -> None:
        """Make ``tp`` what SGLang reads from now on; SGLang validates the set as a whole."""
        sg.get_parallel().override_permanently(**self.topology[tp])
        state = sg.parallel_state
        state._TP = state._ATTN_TP = self.topology[tp]["tp_group"]
        state._WORLD = self.topology[tp]["world_group"]
        if "moe_tp_group" in self.topology[tp]:  # graphs are captured in the scope of this one, too
            state._MOE_TP = self.topology[tp]["moe_tp_group"]


_groups: Groups | None = None


def current() -> Groups:
    if _groups is None:
        raise RuntimeError("PAT's process groups are not built: SGLang did not call its group bootstrap")
    return _groups


def rank_of(settings: Settings) -> int:
    """Rank of this scheduler process in the world of N: SGLang knows its replica and its place in it."""
    parallel = sg.get_parallel()
    return Layout(settings.ranks, settings.base).rank(parallel.dp_rank or 0, parallel.tp_rank)


def build(settings: Settings, *, backend: str, server_args, gpu_id: int) -> None:
    """Replace SGLang's own group bootstrap in a scheduler process."""
    global _groups
    _groups = Groups(settings, rank_of(settings), backend, server_args.device, gpu_id)
    _groups.apply(settings.base)
    sg.parallel_state._tag_groups_for_flashinfer_allreduce_only()
    sg.initialize_dp_attention(server_args=server_args)
