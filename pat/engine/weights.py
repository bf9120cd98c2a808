"""The model of every tensor-parallel size, bound to the resident base shard: no second copy, ever.

Each size has its own model object of SGLang's own class, built without storage under that size's parallel context.
Its parameters are views into the parameters of the base size, so new weights are seen at every size at once and a
switch sends no weights. The rows of a fused parameter are brought together for a size by ``rows.FusedRows``, so that
each layer runs SGLang's own kernel on one view, at every size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import Module, Parameter

from pat.engine import sglang_api as sg
from pat.engine.rows import FusedRows, Parts
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


def row_parts(base: Module, wide: Module, place: Place, kv_heads: tuple[int, int]) -> Parts:
    """The rows of each part of a fused layer's base parameter that the wide layer owns, in the wide layer's order.

    kv_heads: the first KV head (of the model's) that the rank holds at the base and at the wide size.
    """
    if isinstance(wide, sg.QKVParallelLinear):
        head = wide.head_size
        q_rows, kv_rows = wide.num_heads * head, wide.num_kv_heads * head
        keys, values = base.num_heads * head, (base.num_heads + base.num_kv_heads) * head
        offset = (kv_heads[1] - kv_heads[0]) * head
        return (place.index * q_rows, q_rows), (keys + offset, kv_rows), (values + offset, kv_rows)
    whole, sizes = _part_sizes(base), _part_sizes(wide)
    if whole != [size * place.count for size in sizes]:
        raise UnsupportedModel(f"{type(wide).__name__}: {whole} rows are not {place.count} parts of {sizes}")
    return tuple((sum(whole[:part]) + place.index * size, size) for part, size in enumerate(sizes))


def _part_sizes(layer: Module) -> list[int]:
    if isinstance(layer, sg.FusedMoE):
        return [layer.intermediate_size_per_partition] * 2  # gate and up of each expert
    return list(layer.output_partition_sizes)


def _view(module: Module, name: str, full: torch.Tensor, shape: torch.Size, place: Place) -> torch.Tensor:
    """The part of ``full`` that a layer which is not fused owns at ``shape``."""
    if full.shape == shape:
        return full
    if isinstance(module, sg.RowParallelLinear):
        dim = 1
    elif isinstance(module, sg.FusedMoE):
        dim = {"w2_weight": 2}.get(name)
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


def bind(base: Module, wide: Module, place: Place, kv_heads: tuple[int, int], rows: FusedRows, tp: int) -> None:
    """Make every parameter and buffer of ``wide``, of size ``tp``, a view of ``base``'s.

    kv_heads: as in ``row_parts``. rows: must be arranged for ``tp`` before ``wide`` runs. Raises UnsupportedModel
    naming the layer that cannot be divided.
    """
    sources = dict(base.named_modules())
    for name, module in wide.named_modules():
        source = sources[name]
        fused = _fused_parameters(name, source, module)
        parts = row_parts(source, module, place, kv_heads) if fused else ()
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = source._parameters[key].data
            view = rows.view(tp, full, parts) if key in fused else _view(module, key, full, parameter.shape, place)
            if view.shape != parameter.shape:
                raise UnsupportedModel(f"{name}.{key}: {tuple(view.shape)} is not {tuple(parameter.shape)}")
            _replace(module, key, view)
        for key in module._buffers:
            module._buffers[key] = source._buffers[key]


def _fused_parameters(name: str, base: Module, wide: Module) -> tuple[str, ...]:
    """Names of the parameters of a layer whose rows are of several parts. Raises UnsupportedModel if it is packed."""
    method = getattr(base, "quant_method", None)
    if isinstance(wide, (sg.QKVParallelLinear, sg.MergedColumnParallelLinear)):
        plain, fused = type(method) is sg.UnquantizedLinearMethod, ("weight", "bias")
    elif isinstance(wide, sg.FusedMoE):
        plain, fused = type(method) is sg.UnquantizedFusedMoEMethod, ("w13_weight",)
        if plain and method.w13_swiglu_interleaved:
            raise UnsupportedModel(f"{name}: its rows are interleaved; unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED")
    else:
        return ()
    if not plain:
        raise UnsupportedModel(f"{name}: quantised layers ({type(method).__name__}) cannot switch tp")
    return fused


def check_bound(base: Module, wide: Module) -> None:
    """Assert that no parameter of ``wide`` owns memory outside of ``base``'s."""
    owned = {p.untyped_storage().data_ptr() for p in base.parameters()}
    strays = [n for n, p in wide.named_parameters() if p.untyped_storage().data_ptr() not in owned]
    if strays:
        raise AssertionError(f"parameters with memory of their own: {strays[:5]}")
