"""The model of every tensor-parallel size, bound to the resident base shard: no copy, ever.

Each size has its own model object of SGLang's own class, built without storage under that size's parallel context.
Its parameters are views into the parameters of the base size, so new weights are seen at every size at once and a
switch moves no weights. A fused parameter (QKV, gate and up) is not one contiguous view of a larger shard, its parts
are: such a layer runs one GEMM a part. The experts of a mixture are multiplied by kernels that want gate and up of an
expert in one piece: their rows are put in another order, inside their own memory, when the size changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import Module, Parameter
from torch.nn import functional as F

from pat.engine import sglang_api as sg
from pat.layout import Layout


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


@dataclass(frozen=True)
class Place:
    """Where a rank's shard at size ``tp`` lies in its shard at the base size: it is part ``index`` of ``count``."""

    index: int
    count: int

    @classmethod
    def of(cls, base: Layout, wide: Layout, rank: int) -> Place:
        count = wide.tp // base.tp
        return cls(wide.tp_rank(rank) - base.tp_rank(rank) * count, count)


def row_parts(base: Module, wide: Module, place: Place, kv_heads: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """(first row, rows) in the base parameter of each part of a fused layer that the wide layer owns, in order.

    kv_heads: the first KV head (of the model's) that the rank holds at the base and at the wide size.
    """
    if isinstance(wide, sg.QKVParallelLinear):
        head = wide.head_size
        q_rows, kv_rows = wide.num_heads * head, wide.num_kv_heads * head
        yield place.index * q_rows, q_rows
        keys, values = base.num_heads * head, (base.num_heads + base.num_kv_heads) * head
        offset = (kv_heads[1] - kv_heads[0]) * head
        yield keys + offset, kv_rows
        yield values + offset, kv_rows
    else:
        start = 0
        for size in wide.output_partition_sizes:
            yield start + place.index * size, size
            start += size * place.count


class PartsLinear:
    """SGLang linear method for a fused layer whose parts are separate views: one GEMM a part.

    Stands in for ``UnquantizedLinearMethod`` on that layer; input [tokens, in], output [tokens, sum of rows].
    """

    def __init__(self, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> None:
        self.weights, self.biases = weights, biases

    def apply(self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        biases = self.biases if bias is not None else [None] * len(self.weights)
        return torch.cat([F.linear(x, w, b) for w, b in zip(self.weights, biases, strict=True)], dim=-1)


class ExpertRows:
    """Gate and up rows of all experts of one layer, in the order that a size needs.

    weight: [experts, gate rows then up rows, in], the base parameter. For a size that divides the base shard into
    ``count`` parts the order is gate and up of part 0, gate and up of part 1, ...; one expert is copied at a time.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.count = weight, 1

    def _order(self, count: int) -> torch.Tensor:
        rows = torch.arange(self.weight.shape[1], device=self.weight.device)
        return rows.view(2, count, -1).transpose(0, 1).reshape(-1)

    def arrange(self, count: int) -> None:
        """Put the rows in the order for ``count`` parts."""
        if count == self.count:
            return
        present = torch.empty_like(self._order(self.count))
        present[self._order(self.count)] = torch.arange(len(present), device=present.device)
        rows = present[self._order(count)]
        for expert in self.weight:
            expert.copy_(expert[rows])
        self.count = count


def _view(module: Module, name: str, full: torch.Tensor, shape: torch.Size, place: Place) -> torch.Tensor:
    """The part of ``full`` that a layer which is not fused owns at ``shape``."""
    if full.shape == shape:
        return full
    if isinstance(module, sg.RowParallelLinear):
        dim = 1
    elif isinstance(module, sg.FusedMoE):
        dim = {"w13_weight": 1, "w2_weight": 2}.get(name)
    elif isinstance(module, (sg.ColumnParallelLinear, sg.VocabParallelEmbedding)):
        dim = 0
    else:
        dim = None
    if dim is None:
        raise UnsupportedModel(f"{type(module).__name__}.{name}: {tuple(full.shape)} cannot become {tuple(shape)}")
    size = shape[dim]
    if size * place.count != full.shape[dim]:
        raise UnsupportedModel(
            f"{type(module).__name__}.{name}: dimension {dim} of {tuple(full.shape)} is not "
            f"{place.count} parts of {size}"
        )
    return full.narrow(dim, place.index * size, size)


def _replace(module: Module, name: str, tensor: torch.Tensor) -> None:
    parameter = Parameter(tensor, requires_grad=False)
    parameter.__dict__.update(module._parameters[name].__dict__)  # weight_loader and the like
    module._parameters[name] = parameter


def bind(base: Module, wide: Module, place: Place, kv_heads: tuple[int, int]) -> None:
    """Make every parameter and buffer of ``wide`` a view of ``base``'s.

    kv_heads: as in ``row_parts``. Raises UnsupportedModel naming the layer that cannot be divided.
    """
    sources = dict(base.named_modules())
    for name, module in wide.named_modules():
        source = sources[name]
        fused = isinstance(module, (sg.QKVParallelLinear, sg.MergedColumnParallelLinear))
        method = getattr(module, "quant_method", None)
        if (fused and type(method) is not sg.UnquantizedLinearMethod) or (
            isinstance(module, sg.FusedMoE) and type(method) is not sg.UnquantizedFusedMoEMethod
        ):
            raise UnsupportedModel(f"{name}: quantised layers ({type(method).__name__}) cannot switch tp")
        if fused:
            parts = list(row_parts(source, module, place, kv_heads))
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
                    _replace(module, key, _view(module, key, full, parameter.shape, place))
        for key in module._buffers:
            module._buffers[key] = source._buffers[key]


def expert_rows(base: Module) -> list[ExpertRows]:
    """What must be rearranged at a change of size: one a mixture-of-experts layer."""
    return [ExpertRows(module.w13_weight.data) for module in base.modules() if isinstance(module, sg.FusedMoE)]


def check_bound(base: Module, wide: Module) -> None:
    """Assert that no parameter of ``wide`` owns memory outside of ``base``'s."""
    owned = {p.untyped_storage().data_ptr() for p in base.parameters()}
    strays = [n for n, p in wide.named_parameters() if p.untyped_storage().data_ptr() not in owned]
    if strays:
        raise AssertionError(f"parameters with memory of their own: {strays[:5]}")
