"""What SGLang's model runner keeps for one tensor-parallel size, made once at start for each and swapped at a switch.

A set is the model object, the attention backends, the eager runner and, on an accelerator, the captured graphs. A
graph replays with the addresses and head counts of its capture, so a set is built while SGLang's parallel context,
groups and KV pool are those of its size. All sets share the memory that graphs compute in and the workspaces of the
attention backends: only one size runs at a time. SGLang itself shares what is large enough: the logits buffer with a
size that captures no larger batches, an input buffer with one of the same length.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator

import torch
from torch.nn import Module

from pat.engine import sglang_api as sg
from pat.engine.capture import batches
from pat.engine.device import Cpu, device_of

log = logging.getLogger("sglang.pat")

# What the runner keeps for a size, read in SGLang 0.5.23 (a test compares it with SGLang's source).
KEPT = (
    "model",
    # ModelRunner.init_attention_backends and what it calls
    "prefill_attention_backend_str",
    "decode_attention_backend_str",
    "attn_backend",
    "decode_attn_backend",
    "decode_attn_backend_group",
    "linear_attn_backends",  # of models that mix attention with linear attention
    "init_new_workspace",
    # capture_cuda_graphs: the layers that a graph of prefill breaks at; not set without such graphs
    "attention_layers",
    "moe_layers",
    "moe_fusions",
    "dsa_indexers",
    "mha_companion_layers",
    "graph_shared_output",  # one logits buffer for all sizes, unless a size captures larger batches
    # ModelRunner.init_cuda_graphs
    "eager_runner",
    "prefill_cuda_graph_runner",
    "decode_cuda_graph_runner",
    "decode_cuda_graph_captured",
    "decode_cuda_graph_capture_bs",
    "graph_memory_usage",
    "graph_time_usage",
)
# Set by the runner when kernels have been warmed up; SGLang clears it itself when it captures for other groups.
WARMED_UP = "_kernel_warmed_up"
# Share of the device's memory that one size may take, if the caller states no bytes.
MEMORY_FRACTION = 0.05
ADVICE = (
    "capture fewer or smaller batches (cuda_graph_max_bs_decode=, cuda_graph_bs_decode=, cuda_graph_max_bs_prefill= or "
    "disable_prefill_cuda_graph=True), use fewer tp_sizes, or leave more memory free (mem_fraction_static=)"
)


class GraphMemoryError(RuntimeError):
    """A size took more device memory than was stated. The message says which, how much and what to change."""


class Runtimes:
    """The sets of all sizes of one model runner, of which one is on the runner.

    Made while the runner is as SGLang started it, at the base size. budget_bytes: device memory that each further
    size may take; None: 5 % of the device's. backend: SGLang's, of their decode graphs; None: the base's. sharing:
    ranks on this device, which all build at the same time.
    memory_bytes: {tp: device bytes that its set took}; of the base size what SGLang itself measured for its graphs; 0
    on a CPU.
    """

    def __init__(
        self,
        runner,
        budget_bytes: int | None = None,
        device: Cpu | None = None,
        backend: str | None = None,
        sharing: int = 1,
    ) -> None:
        self.runner, self.backend, self.sharing = runner, backend, sharing
        self.device = device or device_of(runner.device)
        self.budget_bytes = int(self.device.total_bytes * MEMORY_FRACTION) if budget_bytes is None else budget_bytes
        self.names = set(KEPT)
        self.tp = sg.get_parallel().tp_size
        self._sets: dict[int, dict] = {self.tp: self._on_runner()}
        self._base_decode_bytes = runner.graph_memory_usage.get("decode", 0) * (1 << 30)
        self.memory_bytes = {self.tp: int(sum(runner.graph_memory_usage.values()) * (1 << 30))}

    # Without gradients as SGLang builds its own, and not in inference mode, whose tensors nobody may write to later.
    @torch.no_grad()
    def add(self, tp: int, model: Module) -> None:
        """Build the set of ``tp`` around ``model`` and leave it on the runner.

        Called at start on all ranks in the same order, with SGLang's parallel context, groups and KV pool already
        those of ``tp``. Raises GraphMemoryError if it takes more than the budget, and whatever SGLang raises.
        """
        parallel, runner = sg.get_parallel(), self.runner
        if tp in self._sets:
            raise ValueError(f"tp {tp} has been built already")
        if parallel.tp_size != tp:
            raise ValueError(f"SGLang's parallel context is of tp {parallel.tp_size}, not of tp {tp}")
        if runner.capture_tail_hooks or runner.capture_head_hooks:
            raise ValueError("a kernel that runs the whole model (megakernel, monokernel) is built for one size only")
        self.device.connect(parallel.tp_group.device_group)
        before, begin = self.device.used_bytes(), time.monotonic()
        as_was = dict(vars(runner))
        self._sets[self.tp] = self._on_runner()
        try:
            runner.model = model
            if self.device.captures_graphs:
                setattr(runner, WARMED_UP, False)  # or workspaces of this size's groups would be made within a capture
            with self._captures_of(tp):
                runner.init_attention_backends()
                runner.init_cuda_graphs()
        except Exception as error:
            error.add_note(f"PAT was building the graphs of tp {tp}. If memory is short: {ADVICE}.")
            raise
        self._keep_strays(as_was)
        self.tp = tp
        self._sets[tp] = self._on_runner()
        taken = self.memory_bytes[tp] = max(0, self.device.used_bytes() - before) // self.sharing
        log.info("PAT: tp %d is ready: %.0f MiB, %.1f s", tp, taken / (1 << 20), time.monotonic() - begin)
        if self.device.captures_graphs and taken > self.budget_bytes:
            raise GraphMemoryError(
                f"attention backends and graphs of tp {tp} took {taken:,} bytes of device memory, more than the "
                f"{self.budget_bytes:,} that each size may take: {ADVICE}, or raise graph_memory_bytes="
            )

    @contextlib.contextmanager
    def _captures_of(self, tp: int) -> Iterator[None]:
        """What SGLang captures in decode is as ``tp`` wants it; the batches only if the user has not given any."""
        graphs = sg.get_exec().graph.cuda_graph_config.decode if self.device.captures_graphs else None
        if graphs is None or not graphs.bs or graphs.backend == "disabled":
            yield
            return
        base = graphs.bs, graphs.max_bs, graphs.backend
        args = self.runner.server_args
        if (args.cuda_graph_config, args.cuda_graph_bs_decode, args.cuda_graph_max_bs_decode) == (None, None, None):
            requests = self.runner.req_to_token_pool.size
            captured = [bs for bs in graphs.bs if bs <= requests] or graphs.bs[:1]
            # What a row of the largest batch has cost at the base size, everything else included: an upper bound.
            row_bytes = self._base_decode_bytes / captured[-1]
            rows = self.budget_bytes / row_bytes if row_bytes else math.inf
            graphs.bs = batches(captured, tp // min(self._sets), requests, rows)
            graphs.max_bs = graphs.bs[-1]
        graphs.backend = self.backend or graphs.backend
        try:
            yield
        finally:
            graphs.bs, graphs.max_bs, graphs.backend = base

    def use(self, tp: int) -> None:
        """Put the set of ``tp`` on the runner. What is on it now is kept as the present size's, replaced or not."""
        if tp not in self._sets:
            raise ValueError(f"tp {tp} is not one of {sorted(self._sets)}")
        if tp == self.tp:
            return
        self._sets[self.tp] = self._on_runner()
        there, wanted = vars(self.runner), self._sets[tp]
        for name in self.names:
            if name in wanted:
                setattr(self.runner, name, wanted[name])
            else:
                there.pop(name, None)
        self.tp = tp

    def _on_runner(self) -> dict:
        there = vars(self.runner)
        return {name: there[name] for name in self.names if name in there}

    def _keep_strays(self, as_was: dict) -> None:
        """What else SGLang set on the runner while it built a size is that size's, too."""
        there = vars(self.runner)
        strays = {n for n in there if n not in as_was or as_was[n] is not there[n]} - self.names - {WARMED_UP}
        if strays:
            log.warning("PAT: SGLang also sets %s for each size; swapped at a switch as well", sorted(strays))
        for name in strays & as_was.keys():
            for values in self._sets.values():
                values[name] = as_was[name]
        self.names |= strays
