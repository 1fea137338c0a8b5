"""The contract of a backend. The base class *is* "no offload": every weight is resident on the device.

A backend is made for a list of weights and a plan, before any weight is read. It reserves memory, says where each
weight goes (`destination`), binds a model's parameters to what it reserved (`attach`), and gives everything back
(`close`). A model is never told which backend runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.device import Device
from offload.plan import ParameterSpec, Plan
from offload.report import MemoryReport


@dataclass(frozen=True)
class Weight:
    """One parameter of a model, before it has memory.

    Attributes:
        name: full name in the module, "model.layers.3.mlp.down_proj.weight".
        layer: index of its decoder layer, None outside the layers.
        shape, dtype: of the parameter.
        storage: equal for names that share one tensor (tied parameters); such weights get one destination.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def weights_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[Weight]:
    """List the parameters of `model` in declaration order, shared ones under each of their names."""
    layer_of = {id(module): index for index, layer in enumerate(layers) for module in layer.modules()}
    found = []
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{leaf}" if prefix else leaf
                layer = layer_of.get(id(module))
                found.append(Weight(name, layer, tuple(parameter.shape), parameter.dtype, id(parameter)))
    return found


def specs_of(weights: Iterable[Weight]) -> list[ParameterSpec]:
    """The same list as the planner wants it: no shapes, no torch."""
    return [ParameterSpec(w.name, w.layer, w.nbytes, w.storage) for w in weights]


class Backend:
    """No offload: one device allocation holds every weight, each aligned to 128 bytes.

    Args:
        weights: every parameter of the model, from `weights_of`.
        plan: what is offloaded (nothing, here).
        device: where it runs.
    """

    def __init__(self, weights: Sequence[Weight], plan: Plan, device: Device) -> None: ...

    def destination(self, name: str) -> Tensor:
        """Where the loader writes weight `name`: (shape), dtype of the weight, in its final place.

        Host memory for an offloaded weight, device memory otherwise; equal for names that share a storage.
        """

    @property
    def asked(self) -> frozenset[str]:
        """Names that a loader has asked for."""

    def attach(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Bind the parameters to what was reserved, register hooks, check residency."""

    def detach(self) -> Mapping[str, Tensor]:
        """Undo `attach` (hooks, classes) and return name -> true weight, for `restore()` and `state_dict()`."""

    def before_capture(self) -> None:
        """Make the compute stream wait for earlier copies, so that a capture may begin."""

    def before_capture_ends(self) -> None:
        """Join the side stream to the compute stream."""

    def after_capture(self) -> None:
        """Make eager code safe again: it must not wait for events recorded in the capture."""

    def report(self) -> MemoryReport: ...

    def close(self) -> None:
        """Undo everything; pages are given back when the last view dies. Idempotent."""
