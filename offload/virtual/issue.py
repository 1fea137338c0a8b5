"""Issuing: streams, events, the host's clock, and the two checks that everything issued passes through.

An operator is checked for races when it is issued and queued for the simulation; nothing here knows of tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from offload.virtual.clocks import Clock, Entry, VirtualEvent, VirtualStream, join
from offload.virtual.profiles import Profile
from offload.virtual.races import RaceDetector, Range
from offload.virtual.simulate import Simulator


class Operation(NamedTuple):
    """What is issued.

    Attributes:
        kind: "kernel", "copy" or "read" (to the host).
        name, layer: the operator, and the decoder layer it belongs to.
        launch_ps: from its turn until its bytes flow.
        demands: bytes or FLOPs by resource.
        reads, writes: byte ranges.
    """

    kind: str
    name: str
    layer: int | None
    launch_ps: int
    demands: dict[str, int]
    reads: list[Range]
    writes: list[Range]


class Issuer:
    """Streams of one device, and the host that fills them.

    Args:
        profile: the hardware.
        races: checks every access.

    Attributes:
        host_ps: the host's clock.
        host_waits: when the host waited for the device.
        streams: all of them; the first is the compute stream.
    """

    def __init__(self, profile: Profile, races: RaceDetector) -> None:
        self._races = races
        self._lock = threading.RLock()
        self._host_clock: Clock = {}
        self.simulator = Simulator(profile)
        self.host_ps = 0
        self.host_waits: list[tuple[int, int]] = []
        self.streams: list[VirtualStream] = []
        self.compute = self.add_stream("compute")

    def add_stream(self, name: str) -> VirtualStream:
        """A new stream; whatever the host has waited for is ordered before it."""
        with self._lock:
            stream = VirtualStream(len(self.streams), name)
            join(stream.clock, self._host_clock)
            self.streams.append(stream)
            return stream

    def spend(self, picoseconds: int) -> None:
        """Let host time pass."""
        with self._lock:
            self.host_ps += picoseconds

    def enqueue(self, operation: Operation, stream: VirtualStream) -> Entry:
        """Put an operator into a stream.

        Raises:
            RaceError: nothing orders it against another one that touches the same bytes.
        """
        kind, name, layer, launch_ps, demands, reads, writes = operation
        with self._lock:
            entry = Entry(kind, name, layer, stream, stream.tick(), self.host_ps, launch_ps, demands)
            for where in reads:
                self._races.read(entry, stream.clock, where)
            for where in writes:
                self._races.write(entry, stream.clock, where)
            stream.last = entry
            self.simulator.submit(entry)
            return entry

    def record(self, event: VirtualEvent, stream: VirtualStream) -> None:
        """The event happens when the last entry of the stream is done."""
        event.recorded, event.capture = True, None
        event.entry, event.clock = stream.last, dict(stream.clock)

    def wait(self, event: VirtualEvent, stream: VirtualStream, layer: int | None, reason: str) -> None:
        """The stream goes on when the event has happened.

        Args:
            reason: what the waiting is called in a report.
        """
        with self._lock:
            join(stream.clock, event.clock)
            if event.entry is not None and event.entry.stream is not stream:
                epoch = stream.clock[stream.index]
                entry = Entry("wait", "wait", layer, stream, epoch, self.host_ps, after=event.entry, reason=reason)
                stream.last = entry
                self.simulator.submit(entry)

    def let_host_wait(self, finish: Callable[[], int], streams: Sequence[VirtualStream]) -> None:
        """The host waits for the device; what is issued afterwards is ordered after these streams.

        Args:
            finish: advances the simulation and returns when the wait ends, in ps.
        """
        with self._lock:
            end_ps = finish()
            if end_ps > self.host_ps:
                self.host_waits.append((self.host_ps, end_ps))
                self.host_ps = end_ps
            for stream in streams:
                join(self._host_clock, stream.clock)
            for stream in self.streams:
                join(stream.clock, self._host_clock)
