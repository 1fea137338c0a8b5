"""The device contract on a CPU: streams run in order, copies really copy, and host and device are one memory.

Nothing is freed by offloading here, and the device says so once. What it is for: the same engine, backends and
schedule run with real weights and real tokens on any machine. Both kinds of memory are the same anonymous mapping, so
that the speed of a load or a copy does not depend on which side it touches; which side a tensor is on is asked of its
address.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload.device import Device, Event, FreeMemory, Graph, Residency, Stream, require_memory
from offload.errors import OffloadConfigWarning
from offload.host import free_host_memory, map_anonymous

_ONE_MEMORY = "on device cpu host and device are one memory: weights are moved, but no memory is freed"


class _Repeated:
    """A graph where nothing can be captured: it issues its body again."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.replay = body


class CpuDevice(Device):
    """One CPU as host and device."""

    name = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._host_ranges: dict[int, int] = {}
        self._warned = False

    def allocate_host(self, nbytes: int) -> Tensor:
        if not self._warned:
            self._warned = True
            warnings.warn(_ONE_MEMORY, OffloadConfigWarning, stacklevel=2)
        host = self._map(nbytes)
        start = host.data_ptr()
        self._host_ranges[start] = start + nbytes
        # An address is used again after its mapping has gone; it must not count as host then.
        weakref.finalize(host.untyped_storage(), self._host_ranges.pop, start, None).atexit = False
        return host

    def allocate_device(self, nbytes: int) -> Tensor:
        return self._map(nbytes)

    def require(self, host_bytes: int = 0, device_bytes: int = 0) -> None:
        # One memory, and pages that nothing has written yet still count as free: only the sum tells.
        require_memory("the host", host_bytes + device_bytes, self.host_memory(), "use a smaller model or dtype")

    def _map(self, nbytes: int) -> Tensor:
        self.require(nbytes)
        return map_anonymous(nbytes)

    def device_view(self, host: Tensor) -> Tensor:
        return host

    def residency(self, tensor: Tensor) -> Residency:
        address = tensor.data_ptr()
        inside = any(start <= address < end for start, end in self._host_ranges.items())
        return "host" if inside else "device"

    def device_memory(self) -> FreeMemory:
        return self.host_memory()

    def host_memory(self) -> FreeMemory:
        return free_host_memory()

    def from_host(self, values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def to_host(self, tensor: Tensor) -> list[Any]:
        return tensor.tolist()

    def new_stream(self) -> Stream:
        return None

    def new_event(self) -> Event:
        return None

    def record(self, event: Event, stream: Stream = None) -> None:
        """Everything issued so far is done already."""

    def wait(self, event: Event, stream: Stream = None) -> None:
        """Every event has happened when somebody can wait for it."""

    def copy(self, destination: Tensor, source: Tensor, stream: Stream = None) -> None:
        destination.copy_(source)

    def synchronise(self) -> None:
        """Nothing is ever outstanding."""

    def capture(self, body: Callable[[], None]) -> Graph:
        self.capturing = True
        try:
            body()
        finally:
            self.capturing = False
        return _Repeated(body)
