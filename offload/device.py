"""The device contract: everything that the rest of `offload` may ask of the machine it runs on.

Engine, loader and backends see a `Device` and nothing else, so the same code runs on a CPU, on a CUDA GPU and on the
virtual GPU. Streams and events are opaque: only the device that made one looks inside. `stream=None` always means the
compute stream, the one on which operators are issued.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from offload.errors import ModelLoadError, NotEnoughMemoryError
from offload.text import gib, shortened

Residency = Literal["host", "device"]
Stream = Any
Event = Any


@dataclass(frozen=True)
class FreeMemory:
    """How much a device, or the host, can still give: `free_bytes` of `total_bytes`."""

    free_bytes: int
    total_bytes: int


class Graph(Protocol):
    """A captured sequence of operators that can be issued again as one."""

    def replay(self) -> None: ...


class Device(ABC):
    """Where a model runs.

    Attributes:
        name: as the user writes it: "cpu", "cuda:0", "virtual:h200-pcie5".
        torch_device: where torch creates this device's tensors ("cpu" or "meta" for a virtual GPU).
        simulated: True if its times come from a model of the hardware and not from a clock.
        unified: True if host and device are one memory, so that offloading frees nothing.
    """

    name: str
    torch_device: torch.device
    simulated: bool = False
    unified: bool = False

    # -- memory -------------------------------------------------------------------------------------------------

    @abstractmethod
    def allocate_host(self, nbytes: int) -> Tensor:
        """Return `nbytes` of host memory that the device can read, as uint8 (nbytes,).

        The pages are locked where that means something, and are given back when the last view of the tensor dies.

        Raises:
            ModelLoadError: the host cannot give that much (cgroup and memlock limits included).
        """

    @abstractmethod
    def allocate_device(self, nbytes: int) -> Tensor:
        """Return `nbytes` of device memory as uint8 (nbytes,), aligned to 128 bytes.

        Raises:
            ModelLoadError: the device cannot give that much.
        """

    @abstractmethod
    def device_view(self, host: Tensor) -> Tensor:
        """Return `host` (a view of `allocate_host` memory) as the device sees it: same bytes, shape, dtype, strides."""

    @abstractmethod
    def residency(self, tensor: Tensor) -> Residency:
        """Say where the bytes of `tensor` live: asked of the address (or storage), never of a mark on the object."""

    @abstractmethod
    def device_memory(self) -> FreeMemory: ...

    @abstractmethod
    def host_memory(self) -> FreeMemory: ...

    def require(self, host_bytes: int = 0, device_bytes: int = 0) -> None:
        """Refuse what host and device cannot give at the same time, before any of it is reserved.

        Raises:
            NotEnoughMemoryError: names what is needed, what there is, and the remedy.
        """
        require_memory("the host", host_bytes, self.host_memory(), "offload less, or raise the limit of the cgroup")
        require_memory(self.name, device_bytes, self.device_memory(), "offload more")

    # -- data that crosses to Python: the only two ways ----------------------------------------------------------

    @abstractmethod
    def from_host(self, values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return a device tensor with these (nested) Python values."""

    @abstractmethod
    def to_host(self, tensor: Tensor) -> list[Any]:
        """Return the values of `tensor` as (nested) Python lists; waits for the operators that produce them."""

    # -- streams ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def new_stream(self) -> Stream: ...

    @abstractmethod
    def new_event(self) -> Event: ...

    @abstractmethod
    def record(self, event: Event, stream: Stream = None) -> None:
        """`event` happens when everything issued to `stream` so far is done."""

    @abstractmethod
    def wait(self, event: Event, stream: Stream = None) -> None:
        """Whatever is issued to `stream` from here on starts after `event`."""

    @abstractmethod
    def copy(self, destination: Tensor, source: Tensor, stream: Stream = None) -> None:
        """Issue a copy of equal-sized tensors on `stream`; the caller orders it with events."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait until everything issued to every stream is done."""

    # -- capture ----------------------------------------------------------------------------------------------------

    capturing: bool = False

    @abstractmethod
    def capture(self, body: Callable[[], None]) -> Graph:
        """Issue `body` once into a graph. Streams it forks must be joined to the compute stream before it returns."""

    # -- what only an observing device uses; free elsewhere -----------------------------------------------------------

    def active(self, foreign: bool = False) -> AbstractContextManager[Any]:
        """Enter this around everything that issues operators, per thread: sets the current device, or observes.

        Args:
            foreign: the operators are those of a model that is not ours, whose code may ask for values on the host.
        """
        return nullcontext()

    def enter_layer(self, layer: int | None) -> None:
        """Name the decoder layer whose operators follow (None: outside the layers)."""

    def mark_step(self, name: str) -> None:
        """Say that one step (a prompt's pass "pp", one decode step "tg") ends here; what follows is the next."""

    def stamp(self, buffer: Tensor, layer: int) -> None:
        """Say that the copy just issued puts `layer` into `buffer`."""

    def check_stamp(self, buffer: Tensor, layer: int) -> None:
        """Say that operators of `layer` are about to read `buffer`; raises if it contains another layer."""

    def close(self) -> None:
        """Give back what the device object itself holds. Idempotent."""


def require_memory(place: str, needed_bytes: int, memory: FreeMemory, remedy: str) -> None:
    """Refuse an allocation that does not fit, before it is tried.

    Raises:
        NotEnoughMemoryError: names what is needed, what there is, and the remedy.
    """
    if needed_bytes > memory.free_bytes:
        raise NotEnoughMemoryError(
            f"not enough memory on {place}: needs {gib(needed_bytes)}, has {gib(memory.free_bytes)}; {remedy}",
            needed_bytes,
            memory.free_bytes,
        )


def open_device(name: str | torch.device | None = None, meta: bool = False) -> Device:
    """Open the device that a user names.

    Args:
        name: "cpu", "cuda" (the first GPU), "cuda:1", or "virtual:NAME" for a simulated GPU; None takes a GPU if there
            is one, else the CPU. A NAME that ends in ".json" is the path of a hardware profile. A `torch.device` does
            too.
        meta: its tensors are on `meta` and have no bytes; a virtual GPU alone can do that.

    Returns:
        The device; the caller closes it.

    Raises:
        ModelLoadError: there is no such device; the message lists those that exist.
    """
    name = None if name is None else str(name)
    if meta and not (name or "").startswith("virtual:"):
        raise ModelLoadError(f"{name or 'a real device'} cannot run without weights (meta): use virtual:NAME")
    if name is None:
        name = "cuda" if _cuda_count() else "cpu"
    if name == "cpu":
        from offload.cpu import CpuDevice

        return CpuDevice()
    if name.startswith("virtual:"):
        from offload.virtual import VirtualDevice

        return VirtualDevice(name.removeprefix("virtual:"), "meta" if meta else "cpu")
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", name)
    index = int(match[1] or 0) if match else None
    if index is None or index >= _cuda_count():
        raise ModelLoadError(f"no device {shortened(name)} here: choose one of {', '.join(_names())}")
    from offload.cuda import CudaDevice

    return CudaDevice(index)


def _cuda_count() -> int:
    from offload.cuda import device_count

    return device_count()


def _names() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(_cuda_count())), "virtual:NAME"]
