"""prefetch: offloaded layers are copied into a few device slots, on a side stream, ahead of compute.

Offloaded layer k (its ordinal) owns slot k % s. When its last kernel has been issued, the next owner of the slot is
copied in, ordered by two events: the copy waits until the slot is free, and the next owner's compute waits until the
copy has arrived. Where nothing fails this is the whole schedule.

What a slot contains is known on the host. A pass that ended early (an exception, Ctrl-C) leaves slots with other
layers than the next pass expects; the hook before a layer sees that and loads the layer on the spot, behind a fresh
"slot is free", since the old one may lie before kernels of the pass that failed.

Capture: every wait that has been issued is remembered as done (`pending`), so a captured pass waits for no event of the
outside if `before_capture` has waited for all of them, and eager code after it waits for no event of the capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from offload.allocation import Allocation, view
from offload.backend import Weight
from offload.device import Device, Event
from offload.hooks import Hook
from offload.offloading import OffloadingBackend
from offload.plan import Plan
from offload.report import MemoryReport


@dataclass(eq=False, slots=True)
class Slot:
    """One static device buffer for the offloaded layers that own it, one at a time.

    Attributes:
        buffer: uint8, as large as the largest owner.
        first: ordinal of the owner that the buffer contains whenever no pass is running.
        free: happens when compute has finished reading the buffer.
        arrived: happens when the last copy into the buffer is done.
        contents: ordinal of the owner whose copy was issued last; None while that is not certain.
        pending: a copy was issued and compute does not wait for it yet.
    """

    buffer: Tensor
    first: int
    free: Event
    arrived: Event
    contents: int | None = None
    pending: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class OffloadedLayer:
    """One layer whose weights come and go.

    Attributes:
        index: of the decoder layer.
        slot: where it runs from.
        source: its region of the host slab, uint8.
        destination: the bytes of the slot that the region goes to.
        follower: ordinal of the layer that the slot goes to next; its own where the slot has no other owner.
    """

    index: int
    slot: Slot
    source: Tensor
    destination: Tensor
    follower: int


class Ring:
    """The schedule: which copy is issued when, what it waits for, and what waits for it.

    Args:
        device: whose streams and events order it.
        slots: where offloaded layers run from.
        layers: the offloaded layers, by ordinal.
    """

    def __init__(self, device: Device, slots: Sequence[Slot], layers: Sequence[OffloadedLayer]) -> None:
        self._device = device
        self._side = device.new_stream()
        self._slots = slots
        self._layers = layers

    def enter(self, ordinal: int) -> None:
        """Before a layer's first kernel: its weights are in its slot."""
        layer = self._layers[ordinal]
        self._ensure(ordinal)
        self._await(layer.slot)
        self._device.check_stamp(layer.slot.buffer, layer.index)

    def leave(self, ordinal: int) -> None:
        """After a layer's last kernel: its slot goes to the next owner."""
        layer = self._layers[ordinal]
        if layer.follower != ordinal:
            self._device.record(layer.slot.free)
            self._onload(layer.follower)

    def _ensure(self, ordinal: int) -> None:
        """Load a layer unless its copy was issued ahead, as it always is in a pass that follows a whole one."""
        slot = self._layers[ordinal].slot
        if slot.contents != ordinal:
            self._device.record(slot.free)
            self._onload(ordinal)

    def _onload(self, ordinal: int) -> None:
        layer = self._layers[ordinal]
        slot = layer.slot
        slot.contents = None
        self._device.wait(slot.free, self._side)
        self._device.copy(layer.destination, layer.source, self._side)
        self._device.stamp(slot.buffer, layer.index)
        self._device.record(slot.arrived, self._side)
        slot.pending = True
        slot.contents = ordinal

    def _await(self, slot: Slot) -> None:
        if slot.pending:
            self._device.wait(slot.arrived)
            slot.pending = False

    def fill(self) -> None:
        """Issue the copies that a pass begins with."""
        for slot in self._slots:
            self._ensure(slot.first)

    def join(self) -> None:
        """Make the compute stream wait for every copy that it does not wait for yet."""
        for slot in self._slots:
            self._await(slot)

    def forget(self) -> None:
        """After a capture: a copy that was captured and not joined never ran, and its events mean nothing now."""
        for slot in self._slots:
            if slot.pending or slot.contents != slot.first:
                slot.pending, slot.contents = False, None


class PrefetchBackend(OffloadingBackend):
    """Whole offloaded layers in slots; the first copies are issued when a model is attached."""

    def __init__(self, weights: Sequence[Weight], plan: Plan, device: Device, requested_bytes: int = 0) -> None:
        self._buffers: list[Allocation] = []
        self._ring: Ring | None = None
        super().__init__(weights, plan, device, requested_bytes)

    def _needed_bytes(self) -> tuple[int, int]:
        host_bytes, device_bytes = super()._needed_bytes()
        return host_bytes, device_bytes + self._plan.slot_bytes

    def _reserve(self) -> None:
        super()._reserve()
        for nbytes in self._plan.slot_sizes_bytes:
            self._buffers.append(Allocation(self._device, nbytes))

    def _view_of_host_weight(self, name: str) -> Tensor:
        weight, place = self._weights[name], self._slab.places[name]
        slot = self._plan.slot_of(self._plan.offloaded_layers.index(place.layer))
        return view(self._buffers[slot].memory, place.offset_bytes, weight)

    def _register_hooks(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        super()._register_hooks(model, layers)
        self._ring = self._make_ring()
        for ordinal, index in enumerate(self._plan.offloaded_layers):
            enter, leave = _Enter(self._ring, ordinal), _Leave(self._ring, ordinal)
            self._handles.append(layers[index].register_forward_pre_hook(enter, prepend=True))
            self._handles.append(layers[index].register_forward_hook(leave))
        with self._device.active():
            self._ring.fill()

    def _make_ring(self) -> Ring:
        device, plan = self._device, self._plan
        slots = [
            Slot(buffer.memory, first, device.new_event(), device.new_event())
            for first, buffer in enumerate(self._buffers)
        ]
        layers = []
        for ordinal, index in enumerate(plan.offloaded_layers):
            slot, source = slots[plan.slot_of(ordinal)], self._slab.layer(index)
            destination = slot.buffer[: source.numel()]
            layers.append(OffloadedLayer(index, slot, source, destination, plan.next_owner(ordinal)))
        return Ring(device, slots, layers)

    def before_capture(self) -> None:
        self._ring.fill()
        self._ring.join()

    def before_capture_ends(self) -> None:
        self._ring.join()

    def after_capture(self) -> None:
        self._ring.forget()

    def report(self) -> MemoryReport:
        return replace(super().report(), slot_bytes=sum(buffer.nbytes for buffer in self._buffers))

    def _release(self) -> None:
        super()._release()
        self._ring = None
        for buffer in self._buffers:
            buffer.release()


class _Enter(Hook):
    __slots__ = ("_ordinal", "_ring")

    def __init__(self, ring: Ring, ordinal: int) -> None:
        self._ring, self._ordinal = ring, ordinal

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._ring.enter(self._ordinal)


class _Leave(Hook):
    __slots__ = ("_ordinal", "_ring")

    def __init__(self, ring: Ring, ordinal: int) -> None:
        self._ring, self._ordinal = ring, ordinal

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._ring.leave(self._ordinal)
