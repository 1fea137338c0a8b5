"""The parameters of a module as a list, before they have memory: what plans are made of and backends reserve for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.plan import ParameterSpec


@dataclass(frozen=True)
class Weight:
    """One parameter of a model, before it has memory.

    Attributes:
        name: full name in the module, "model.layers.3.mlp.down_proj.weight".
        layer: index of its decoder layer, None outside the layers.
        shape, dtype: of the parameter.
        storage: equal for names that share one tensor (tied parameters); such weights get one destination.
        strides: in elements, of a dense tensor whose dimensions lie in another order (a transposed matrix, channels
            last), since a product's bits depend on it; None for a contiguous one.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def weights_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[Weight]:
    """List the parameters of `model` in declaration order, shared ones under each of their names.

    A module that stands in several places, or in several layers, is listed at each, so that nobody takes a weight that
    two layers use for the weight of one.
    """
    places: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        places.setdefault(id(layer), []).append(index)
    return list(_walk(model, "", None, places))


def _walk(module: nn.Module, prefix: str, layer: int | None, places: dict[int, list[int]]) -> Iterator[Weight]:
    here = places.get(id(module))
    if here:
        # The children of a ModuleList come in its order, so a layer that is listed twice is met once for each index.
        layer = here.pop(0) if len(here) > 1 else here[0]
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            shape, strides = tuple(parameter.shape), _strides(parameter)
            yield Weight(prefix + leaf, layer, shape, parameter.dtype, id(parameter), strides)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.", layer, places)


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of a dense tensor that is not contiguous; one with gaps loses them."""
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), -tensor.shape[dim]))
    return tensor.stride() if tensor.permute(order).is_contiguous() else None


def specs_of(weights: Iterable[Weight]) -> list[ParameterSpec]:
    """The same list as the planner wants it: no shapes, no torch."""
    return [ParameterSpec(w.name, w.layer, w.nbytes, w.storage) for w in weights]
