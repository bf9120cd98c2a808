"""The model of every tensor-parallel size, bound to the resident base shard: no copy, ever.

Each size has its own model object of SGLang's own class, built without storage under that size's parallel context.
Its parameters are views into the base (tp 1) parameters, so new weights are seen at every size at once and a
switch moves no weights. A fused parameter (QKV, gate and up) is not one contiguous view at tp > 1, its parts are:
such a layer runs one GEMM a part.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import Module, Parameter
from torch.nn import functional as F

from pat.engine import sglang_api as sg


class UnsupportedModel(ValueError):
    """A parameter that PAT does not know how to divide."""


def build_model(runner, topology: dict) -> Module:
    """The runner's model under another parallel context, without storage.

    Raises whatever SGLang's model raises when it cannot be divided by that tp.
    """
    with (
        sg.get_parallel().override(**topology),
        sg.set_default_torch_dtype(runner.model_config.dtype),
        torch.device("meta"),
    ):
        return sg.initialize_model(runner.model_config, runner.load_config).eval()


def row_parts(module: Module, tp_rank: int, tp: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each part of a fused parameter that ``tp_rank`` of ``tp`` owns, in order."""
    if isinstance(module, sg.QKVParallelLinear):
        head, kv_replicas = module.head_size, module.num_kv_head_replicas
        kv_rank = tp_rank // kv_replicas
        q_rows, kv_rows = module.num_heads * head, module.num_kv_heads * head
        yield tp_rank * q_rows, q_rows
        total_q, total_kv = module.total_num_heads * head, module.total_num_kv_heads * head
        yield total_q + kv_rank * kv_rows, kv_rows
        yield total_q + total_kv + kv_rank * kv_rows, kv_rows
    else:
        start = 0
        for rows in module.output_sizes:
            yield start + tp_rank * (rows // tp), rows // tp
            start += rows


class PartsLinear:
    """SGLang linear method for a fused layer whose parts are separate views: one GEMM a part.

    Stands in for ``UnquantizedLinearMethod`` on that layer; input [tokens, in], output [tokens, sum of rows].
    """

    def __init__(self, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> None:
        self.weights, self.biases = weights, biases

    def apply(self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        biases = self.biases if bias is not None else [None] * len(self.weights)
        return torch.cat([F.linear(x, w, b) for w, b in zip(self.weights, biases, strict=True)], dim=-1)


def _view(module: Module, name: str, full: torch.Tensor, shape: torch.Size, tp_rank: int) -> torch.Tensor:
    """The part of ``full`` that a layer which is not fused owns at ``shape``."""
    if full.shape == shape:
        return full
    if isinstance(module, sg.RowParallelLinear):
        dim = 1
    elif isinstance(module, (sg.ColumnParallelLinear, sg.VocabParallelEmbedding)):
        dim = 0
    else:
        raise UnsupportedModel(f"{type(module).__name__}.{name}: {tuple(full.shape)} cannot become {tuple(shape)}")
    size = shape[dim]
    if (tp_rank + 1) * size > full.shape[dim]:
        raise UnsupportedModel(
            f"{type(module).__name__}.{name}: dimension {dim} of {tuple(full.shape)} has no part {tp_rank} of {size}"
        )
    return full.narrow(dim, tp_rank * size, size)


def _replace(module: Module, name: str, tensor: torch.Tensor) -> None:
    parameter = Parameter(tensor, requires_grad=False)
    parameter.__dict__.update(module._parameters[name].__dict__)  # weight_loader and the like
    module._parameters[name] = parameter


def bind(base: Module, wide: Module, tp_rank: int, tp: int) -> None:
    """Make every parameter and buffer of ``wide`` a view of ``base``'s (tp 1) for rank ``tp_rank`` of ``tp``.

    Raises UnsupportedModel naming the layer that cannot be divided.
    """
    sources = dict(base.named_modules())
    for name, module in wide.named_modules():
        source = sources[name]
        fused = isinstance(module, (sg.QKVParallelLinear, sg.MergedColumnParallelLinear))
        if fused and type(module.quant_method) is not sg.UnquantizedLinearMethod:
            raise UnsupportedModel(f"{name}: quantised layers ({type(module.quant_method).__name__}) cannot switch tp")
        if fused:
            parts = list(row_parts(module, tp_rank, tp))
            weight, bias = source.weight.data, source.bias.data if source.bias is not None else None
            module.quant_method = PartsLinear(
                [weight.narrow(0, start, rows) for start, rows in parts],
                [bias.narrow(0, start, rows) if bias is not None else None for start, rows in parts],
            )
            for key in ("weight", "bias"):
                if module._parameters.get(key) is not None:
                    _replace(module, key, source._parameters[key].data)
        else:
            for key, parameter in list(module._parameters.items()):
                if parameter is not None:
                    full = source._parameters[key].data
                    _replace(module, key, _view(module, key, full, parameter.shape, tp_rank))
        for key in module._buffers:
            module._buffers[key] = source._buffers[key]


def check_bound(base: Module, wide: Module) -> None:
    """Assert that no parameter of ``wide`` owns memory outside of ``base``'s."""
    owned = {p.untyped_storage().data_ptr() for p in base.parameters()}
    strays = [n for n, p in wide.named_parameters() if p.untyped_storage().data_ptr() not in owned]
    if strays:
        raise AssertionError(f"parameters with memory of their own: {strays[:5]}")
