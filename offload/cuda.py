"""The device contract on one CUDA GPU. The only code in `offload/` that calls `torch.cuda`.

The compute stream is torch's current stream at the time of each call, so that a caller's own `torch.cuda.stream(...)`,
and a capture, are respected. Nothing here waits for the GPU except `to_host`, `synchronise` and the start of a capture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from offload.device import Device, Event, FreeMemory, Graph, Residency, Stream
from offload.errors import ModelLoadError, NotEnoughMemoryError
from offload.host import free_host_memory, map_anonymous
from offload.text import gib
from offload_kernels import memory


def _without_owner(host: Tensor) -> Tensor:
    """See the same bytes without keeping them alive: a lock that did would never be released with the last view."""
    return torch.frombuffer((ctypes.c_ubyte * host.numel()).from_address(host.data_ptr()), dtype=torch.uint8)


def _refused_lock(nbytes: int, error: RuntimeError) -> ModelLoadError:
    """Say what the driver refused, with the memlock limit if that is less than what was asked for.

    The limit is no reason to refuse before: NVIDIA's open kernel modules pin user pages without looking at it
    (`os_lock_user_pages` in os-mlock.c), and the default of a container, 8 MiB, would forbid every load.
    """
    limit = free_host_memory(locked=True)
    if limit.free_bytes < nbytes:
        remedy = f"the driver says {error}: offload less, or raise the limit (ulimit -l)"
        text = f"cannot page-lock host memory: needs {gib(nbytes)}, memlock leaves {gib(limit.free_bytes)}; {remedy}"
        return NotEnoughMemoryError(text, nbytes, limit.free_bytes)
    return ModelLoadError(f"cannot page-lock {gib(nbytes)} of host memory: {error}: offload less")


def device_count(cuda: Any = torch.cuda) -> int:
    """Number of GPUs that this process can use."""
    return cuda.device_count() if cuda.is_available() else 0


class CudaDevice(Device):
    """One GPU.

    Args:
        index: its number among the visible GPUs.
        cuda: `torch.cuda`, or what stands in for it.
    """

    def __init__(self, index: int, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._index = index
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self.unified = bool(cuda.get_device_properties(index).is_integrated)

    def allocate_host(self, nbytes: int) -> Tensor:
        self.require(host_bytes=nbytes)
        locks = ExitStack()
        host = map_anonymous(nbytes, on_release=locks.close)
        try:
            with self.active():
                locks.enter_context(memory.page_lock(_without_owner(host)))
        except RuntimeError as error:
            raise _refused_lock(nbytes, error) from error
        # Done first on release: no kernel and no copy may still read pages that are unlocked.
        locks.callback(self.synchronise)
        return host

    def allocate_device(self, nbytes: int) -> Tensor:
        self.require(device_bytes=nbytes)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            text = f"no {gib(nbytes)} in one piece on {self.name}: offload more"
            raise NotEnoughMemoryError(text, nbytes, self.device_memory().free_bytes) from error

    def device_view(self, host: Tensor) -> Tensor:
        return memory.device_view(host, self.torch_device)

    def residency(self, tensor: Tensor) -> Residency:
        return "host" if memory.is_host_resident(tensor) else "device"

    def device_memory(self) -> FreeMemory:
        free_bytes, total_bytes = self._cuda.mem_get_info(self._index)
        # What torch's allocator holds without using it serves the next request.
        cached_bytes = self._cuda.memory_reserved(self._index) - self._cuda.memory_allocated(self._index)
        return FreeMemory(free_bytes + cached_bytes, total_bytes)

    def host_memory(self) -> FreeMemory:
        return free_host_memory()

    def from_host(self, values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        # Page-locked, so that the copy is ordered on the stream and the host goes on at once.
        return torch.tensor(values, dtype=dtype).pin_memory().to(self.torch_device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> list[Any]:
        return tensor.tolist()

    def new_stream(self) -> Stream:
        return self._cuda.Stream(self._index)

    def new_event(self) -> Event:
        return self._cuda.Event()

    def record(self, event: Event, stream: Stream = None) -> None:
        event.record(stream or self._cuda.current_stream(self._index))

    def wait(self, event: Event, stream: Stream = None) -> None:
        (stream or self._cuda.current_stream(self._index)).wait_event(event)

    def copy(self, destination: Tensor, source: Tensor, stream: Stream = None) -> None:
        with self._cuda.stream(stream):
            destination.copy_(source, non_blocking=True)

    def synchronise(self) -> None:
        self._cuda.synchronize(self._index)

    def capture(self, body: Callable[[], None]) -> Graph:
        graph = self._cuda.CUDAGraph()
        with self.active(), self._cuda.graph(graph):
            self.capturing = True
            try:
                body()
            finally:
                self.capturing = False
        return graph

    def active(self, foreign: bool = False) -> AbstractContextManager[Any]:
        return self._cuda.device(self._index)
