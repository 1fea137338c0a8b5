"""uva: kernels read host weights in place, over the bus, through device views of page-locked memory.

A matrix crosses the bus once per use, whatever reads it. A vector (a norm, a bias) is read by every row, so it is not
read in place: all vectors of a layer cross together, by one copy on the compute stream right before the layer runs,
into a staging buffer that the layers share. The stream's own order keeps one layer's vectors from overtaking another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from offload.allocation import Allocation, view
from offload.backend import Weight
from offload.device import Device, Residency
from offload.hooks import Hook
from offload.linear import read_in_place, restore_class
from offload.offloading import OffloadingBackend
from offload.plan import aligned
from offload.report import MemoryReport


class UvaBackend(OffloadingBackend):
    """Host weights as device views; their vectors staged once per use.

    A vector that several layers share has one place and so no layer's copy to come with: it is read in place.
    """

    _staging: Allocation | None = None

    def _needed_bytes(self) -> tuple[int, int]:
        host_bytes, device_bytes = super()._needed_bytes()
        return host_bytes, device_bytes + self._staging_bytes()

    def _reserve(self) -> None:
        super()._reserve()
        self._staged = self._vectors_of_one_layer()
        self._staging = Allocation(self._device, self._staging_bytes())

    def _staging_bytes(self) -> int:
        """Size of the largest vector region: a layer's vectors, each under the first layer that uses it."""
        owners: dict[int, Weight] = {}
        for name in self._plan.offloaded:
            owners.setdefault(self._weights[name].storage, self._weights[name])
        by_layer = dict.fromkeys(self._plan.offloaded_layers, 0)
        for weight in owners.values():
            by_layer[weight.layer] += aligned(weight.nbytes) if len(weight.shape) < 2 else 0
        return max(by_layer.values(), default=0)

    def _vectors_of_one_layer(self) -> frozenset[str]:
        layers: dict[int, set[int | None]] = {}
        for name in self._plan.offloaded:
            layers.setdefault(self._weights[name].storage, set()).add(self._weights[name].layer)
        vectors = (self._weights[name] for name in self._plan.offloaded if len(self._weights[name].shape) < 2)
        return frozenset(weight.name for weight in vectors if len(layers[weight.storage]) == 1)

    def _view_of_host_weight(self, name: str) -> Tensor:
        if name not in self._staged:
            return self._device.device_view(self._true(name))
        weight = self._weights[name]
        return view(self._staging.memory, self._slab.places[name].offset_bytes, weight)

    def _planned_residency(self, name: str) -> Residency:
        return "host" if name in self._slab.places and name not in self._staged else "device"

    def _register_hooks(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        super()._register_hooks(model, layers)
        for name in self._plan.offloaded:
            path, _, leaf = name.rpartition(".")
            if leaf == "weight":
                read_in_place(model.get_submodule(path))
        for layer in self._plan.offloaded_layers:
            vectors = self._slab.vectors(layer)
            if vectors.numel():
                hook = _StageVectors(self._device, self._staging.memory[: vectors.numel()], vectors)
                self._handles.append(layers[layer].register_forward_pre_hook(hook, prepend=True))

    def _restore_classes(self, model: nn.Module) -> None:
        for name in self._plan.offloaded:
            restore_class(model.get_submodule(name.rpartition(".")[0]))

    def report(self) -> MemoryReport:
        return replace(super().report(), staging_bytes=self._staging.nbytes if self._staging is not None else 0)

    def _release(self) -> None:
        super()._release()
        if self._staging is not None:
            self._staging.release()


class _StageVectors(Hook):
    """Brings one layer's vectors to the device, before the layer."""

    __slots__ = ("_destination", "_device", "_source")

    def __init__(self, device: Device, destination: Tensor, source: Tensor) -> None:
        self._device, self._destination, self._source = device, destination, source

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._device.copy(self._destination, self._source)
