"""The host slab: one private anonymous mapping that holds every offloaded weight.

A general allocator rounds pinned memory up, to a power of two in torch's case, and keeps it after the model is gone. A
mapping of our own has the exact size, can ask for huge pages, and goes back to the system with the last tensor that
looks into it. Each offloaded layer is one contiguous region, so that it is one copy; in it the vectors (norms, biases)
come first and side by side, so that they too are one copy when they are staged alone.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.allocation import view
from offload.errors import ModelLoadError
from offload.host_limits import free_host_memory
from offload.plan import aligned
from offload.text import gib

if TYPE_CHECKING:
    from offload.backend import Weight
    from offload.device import Device

__all__ = ["HostSlab", "free_host_memory", "map_anonymous"]


class _Mapping(mmap.mmap):
    """A mapping that lets its owner undo something, such as a page lock, just before it is unmapped."""

    on_release: Callable[[], None] | None = None

    def __del__(self) -> None:
        # A weak reference's callback would come too late: mmap unmaps first. __del__ runs before that.
        if self.on_release is not None:
            self.on_release()


def map_anonymous(nbytes: int, on_release: Callable[[], None] | None = None) -> Tensor:
    """Reserve host memory of exactly this size; pages appear, zeroed, when they are first written.

    Args:
        nbytes: size in bytes; the mapping is rounded up to whole pages.
        on_release: called once, after the last tensor that views the memory has died and before it is unmapped.

    Returns:
        uint8 (nbytes,), aligned to a page. The mapping lives exactly as long as some tensor views it.

    Raises:
        ModelLoadError: the system refuses the mapping.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        mapping = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ModelLoadError(f"the host gives no mapping of {gib(nbytes)} ({error.strerror}): offload less") from error
    # A request: a kernel without huge pages refuses it, and the memory is as good, only slower to fill.
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    mapping.on_release = on_release
    return tensor


class Place(NamedTuple):
    """Where an offloaded weight lies: in which layer's region, how far into it, and its size without padding."""

    layer: int
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True)
class LayerLayout:
    """One offloaded layer as a contiguous byte region, the same in the host slab and in a slot.

    Attributes:
        layer: index of the layer.
        names: full names of the weights that have their place here, in order; a shared weight stands under its first
            name.
        offsets_bytes: where each begins, a multiple of 128.
        nbytes: size of the region, padding included.
    """

    layer: int
    names: tuple[str, ...]
    offsets_bytes: tuple[int, ...]
    nbytes: int


class HostSlab:
    """The offloaded weights of one model in one piece of host memory.

    Args:
        weights: what is offloaded, in the order of the plan; names with equal `storage` share one place.
        device: which allocates the memory, and locks it where that means something.

    Attributes:
        layouts: the layers' regions, in order; offsets are relative to the region.
        places: for each name the layer in whose region it lies, and where.
        offloaded_bytes: size of the weights without padding.
        locked_bytes: size of the mapping: weights, padding, and the rest of the last page.

    Raises:
        ModelLoadError: the host has too little memory.
    """

    def __init__(self, weights: Sequence[Weight], device: Device) -> None:
        self._weights = {weight.name: weight for weight in weights}
        self.layouts, self.places = _laid_out(weights)
        self._starts: dict[int, int] = {}
        total_bytes = 0
        for layout in self.layouts:
            self._starts[layout.layer] = total_bytes
            total_bytes += layout.nbytes
        self.offloaded_bytes = sum(self.places[name].nbytes for layout in self.layouts for name in layout.names)
        self.locked_bytes = -(-total_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory: Tensor | None = device.allocate_host(total_bytes)
        self._storage = StorageWeakRef(self._memory.untyped_storage())
        self._range = _byte_range(self._memory)

    @property
    def memory(self) -> Tensor:
        """The whole slab, uint8."""
        if self._memory is None:
            raise ValueError("the host slab is closed: ask for views before close()")
        return self._memory

    def view(self, name: str) -> Tensor:
        """Weight `name` in its place: (shape), dtype of the weight, its strides, 128-byte aligned."""
        weight, place = self._weights[name], self.places[name]
        start = self._starts[place.layer] + place.offset_bytes
        return view(self.memory, start, weight)

    def layer(self, layer: int) -> Tensor:
        """The whole region of a decoder layer, uint8, padding included: what one copy moves.

        Empty for a layer all of whose weights lie in the region of a layer that shares them.
        """
        start = self._starts.get(layer, 0)
        return self.memory[start : start + self._layout(layer).nbytes]

    def vectors(self, layer: int) -> Tensor:
        """The part of a layer's region that holds its vectors, uint8, padding included; empty if it has none."""
        layout = self._layout(layer)
        ends = [
            offset + aligned(self.places[name].nbytes)
            for name, offset in zip(layout.names, layout.offsets_bytes, strict=True)
            if len(self._weights[name].shape) < 2
        ]
        return self.layer(layer)[: max(ends, default=0)]

    def close(self) -> None:
        """Let go of the memory; it is unlocked and unmapped when the last view dies. Idempotent."""
        self._memory = None

    @property
    def survivors(self) -> tuple[str, ...]:
        """After `close()`: names of the weights into whose bytes some living tensor still looks.

        Where the memory is alive and no tensor that Python knows of is the reason (a saved graph, say), every name.
        """
        if self._memory is not None or self._storage.expired():
            return ()
        begin, _ = self._range
        seen = [_byte_range(tensor) for tensor in _living_tensors() if self._looks_inside(tensor)]
        names = []
        for name, place in self.places.items():
            start = begin + self._starts[place.layer] + place.offset_bytes
            if any(first < start + place.nbytes and start < last for first, last in seen):
                names.append(name)
        return tuple(names or self.places)

    def _layout(self, layer: int) -> LayerLayout:
        own = (layout for layout in self.layouts if layout.layer == layer)
        return next(own, LayerLayout(layer, (), (), 0))

    def _looks_inside(self, tensor: Tensor) -> bool:
        """By address, since a device's view has a storage of its own; by storage where tensors have no address."""
        if tensor.layout != torch.strided:
            return False
        if tensor.is_meta:
            return StorageWeakRef(tensor.untyped_storage()) == self._storage
        begin, end = self._range
        return begin <= tensor.data_ptr() < end


def _laid_out(weights: Sequence[Weight]) -> tuple[tuple[LayerLayout, ...], dict[str, Place]]:
    """Give every weight its place in its layer's region: vectors first, then the rest, each in the given order."""
    owners: dict[int, Weight] = {}
    for weight in weights:
        owners.setdefault(weight.storage, weight)
    by_layer: dict[int, list[Weight]] = {}
    for weight in owners.values():
        if weight.layer is None:
            raise ValueError(f"{weight.name} is outside the decoder layers: only their parameters can be offloaded")
        by_layer.setdefault(weight.layer, []).append(weight)
    layouts, places = [], {}
    for layer, own in by_layer.items():
        own.sort(key=lambda weight: len(weight.shape) >= 2)
        offsets, end = [], 0
        for weight in own:
            offsets.append(end)
            places[weight.storage] = Place(layer, end, weight.nbytes)
            end += aligned(weight.nbytes)
        layouts.append(LayerLayout(layer, tuple(weight.name for weight in own), tuple(offsets), end))
    return tuple(layouts), {weight.name: places[weight.storage] for weight in weights}


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of what a tensor looks at, by address, or within its storage where there is no address."""
    begin = tensor.storage_offset() * tensor.itemsize if tensor.is_meta else tensor.data_ptr()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (span * tensor.itemsize if tensor.numel() else 0)


def _living_tensors() -> list[Tensor]:
    # Exact types: a fake or wrapping tensor has no address, and a dead proxy answers isinstance with an error.
    return [each for each in gc.get_objects() if type(each) is Tensor or type(each) is nn.Parameter]
