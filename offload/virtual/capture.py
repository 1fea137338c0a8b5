"""Capture and replay: the rules of a captured CUDA graph, and what a replay does.

While a body is captured nothing happens on the device, as on CUDA: whatever the body changed in memory that existed
before is put back at the end, and what it made is poisoned until a replay fills it. Rules that are checked:

- a stream takes part once it waits for an event that was recorded in the capture; nothing may be issued on any other;
- inside, only events recorded inside may be waited for; eager code may not wait for those afterwards;
- every stream that takes part must be joined to the compute stream before the end;
- nothing may wait for the device, bring data to it from Python, or replay another graph.

In a replay, side streams of the capture are branches of the graph, not the eager streams of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offload.virtual.clocks import Clock, VirtualEvent, VirtualStream, join
from offload.virtual.issue import Operation
from offload.virtual.races import Range

if TYPE_CHECKING:
    from offload.virtual.device import VirtualDevice


class CaptureError(RuntimeError):
    """A rule of captured graphs is broken."""


@dataclass
class CapturedOperator:
    """One operator of a graph, and how to run it again (None on memory without numbers)."""

    operation: Operation
    stream: VirtualStream
    rerun: tuple[Any, ...] | None

    def bring(self, layer: int) -> None:
        """This copy brings a layer's weights, whichever layer ran when it was issued."""
        self.operation = self.operation._replace(layer=layer)


@dataclass
class CapturedRecord:
    event: VirtualEvent
    stream: VirtualStream


@dataclass
class CapturedWait:
    event: VirtualEvent
    stream: VirtualStream
    layer: int | None
    reason: str


@dataclass
class CapturedStamp:
    """A stamp that is put (`check` False) or looked at."""

    where: Range
    layer: int
    check: bool


Node = CapturedOperator | CapturedRecord | CapturedWait | CapturedStamp


@dataclass
class Capture:
    """A capture in progress: its nodes, and what must be put back.

    Args:
        compute: the stream on which it begins and to which every other must be joined.
    """

    compute: VirtualStream
    nodes: list[Node] = field(default_factory=list)
    _clocks: dict[VirtualStream, Clock] = field(default_factory=dict)
    _event_clocks: dict[VirtualEvent, Clock] = field(default_factory=dict)
    _saved: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _made: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._clocks[self.compute] = {self.compute.index: 0}

    def preserve(self, tensors: list[Tensor]) -> None:
        """Remember the contents of tensors that are about to be changed."""
        self._saved += [(tensor, tensor.clone()) for tensor in tensors if tensor.device.type != "meta"]

    def operator(self, node: CapturedOperator) -> None:
        """Add an operator.

        Raises:
            CaptureError: its stream does not take part.
        """
        clock = self._clock(node.stream, f"operator {node.operation.name!r}")
        clock[node.stream.index] += 1
        self.nodes.append(node)
        if node.rerun is not None:
            self._made += node.rerun[3]

    def record(self, event: VirtualEvent, stream: VirtualStream) -> None:
        self._event_clocks[event] = dict(self._clock(stream, "an event"))
        event.capture = self
        event.recorded = True
        self.nodes.append(CapturedRecord(event, stream))

    def wait(self, event: VirtualEvent, stream: VirtualStream, layer: int | None, reason: str) -> None:
        """Let a stream wait; a stream that did not take part does from now on.

        Raises:
            CaptureError: the event was recorded outside the capture.
        """
        if not event.recorded:
            return
        if event.capture is not self:
            raise CaptureError(
                f"{stream} waits inside a capture for an event that was recorded outside it (layer {layer})"
            )
        clock = self._clocks.setdefault(stream, {stream.index: 0})
        join(clock, self._event_clocks[event])
        self.nodes.append(CapturedWait(event, stream, layer, reason))

    def finish(self) -> None:
        """Check that every stream was joined.

        Raises:
            CaptureError: one was not.
        """
        joined = self._clocks[self.compute]
        for stream, clock in self._clocks.items():
            if joined.get(stream.index, -1) < clock[stream.index]:
                raise CaptureError(
                    f"{stream} was forked in the capture and is not joined to {self.compute} before its end"
                )
        for node in reversed(self.nodes):
            if isinstance(node, CapturedWait) and node.stream is self.compute:
                node.reason = "join"
            elif isinstance(node, CapturedOperator) and node.stream is self.compute:
                break

    def undo(self) -> None:
        """Put back what the body changed and poison what it made: a capture executes nothing."""
        with torch.inference_mode():
            for tensor, before in reversed(self._saved):
                tensor.copy_(before)
            for tensor in self._made:
                if tensor.device.type != "meta":
                    tensor.fill_(float("nan") if tensor.is_floating_point() else _poison(tensor.dtype))
        self._saved.clear()

    def _clock(self, stream: VirtualStream, what: str) -> Clock:
        clock = self._clocks.get(stream)
        if clock is None:
            raise CaptureError(f"{what} is issued on {stream} inside a capture that this stream did not join")
        return clock


def _poison(dtype: torch.dtype) -> int | bool:
    return True if dtype == torch.bool else torch.iinfo(dtype).min


class VirtualGraph:
    """A captured graph of a virtual GPU."""

    def __init__(self, device: VirtualDevice, nodes: list[Node]) -> None:
        self._device = device
        self._nodes = nodes
        compute = device.issuer.compute
        self._branches: dict[VirtualStream, VirtualStream] = {compute: compute}

    def replay(self) -> None:
        """Issue all of it as one, and run its operators again.

        Raises:
            CaptureError: another graph is being captured.
        """
        device, issuer = self._device, self._device.issuer
        device.refuse_in_capture("replay", "what a graph does is not captured")
        issuer.spend(device.profile.graph_issue_ps)
        events: dict[VirtualEvent, VirtualEvent] = {}
        with device.quiet(), torch.inference_mode():
            for node in self._nodes:
                if isinstance(node, CapturedOperator):
                    issuer.enqueue(node.operation, self._branch(node.stream))
                    if node.rerun is not None:
                        device.numerics.again(*node.rerun)
                elif isinstance(node, CapturedRecord):
                    events[node.event] = VirtualEvent()
                    issuer.record(events[node.event], self._branch(node.stream))
                elif isinstance(node, CapturedWait):
                    issuer.wait(events[node.event], self._branch(node.stream), node.layer, node.reason)
                else:
                    apply = device.stamps.check if node.check else device.stamps.put
                    apply(node.where, node.layer)

    def _branch(self, stream: VirtualStream) -> VirtualStream:
        branch = self._branches.get(stream)
        if branch is None:
            branch = self._branches[stream] = self._device.issuer.add_stream(f"{stream.name} (graph)")
        return branch
