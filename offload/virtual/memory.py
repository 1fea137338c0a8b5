"""Memory of the virtual GPU: who holds how much, by the lifetime of storages.

Reserved memory is what `allocate_device` gave (weights, slots, cache); the rest is what operators made or read.
Rounding by an allocator is not modelled: a storage holds its own bytes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.device import FreeMemory, Residency
from offload.errors import NotEnoughMemoryError
from offload.text import gib

_REMEDY: dict[Residency, str] = {"device": "offload more", "host": "offload less"}


class VirtualOutOfMemoryError(NotEnoughMemoryError, torch.OutOfMemoryError):
    """The profile's memory is full; the message says what holds how much."""


class _Watch(weakref.ref):
    """A weak reference to a storage that still knows the storage's number when it has died."""

    __slots__ = ("key",)
    key: int


@dataclass
class _Holding:
    nbytes: int
    residency: Residency
    purpose: str


class MemoryAccount:
    """Live storages of one virtual GPU and its host.

    The death of a storage is only noted where it happens and settled at the next question: an exception in a callback
    of a weak reference is lost, and so would be a Ctrl-C that comes while Python code runs there.

    Args:
        device_bytes, host_bytes: capacities.
        on_free: called with the number of a storage that died.
    """

    def __init__(self, device_bytes: int, host_bytes: int, on_free: Callable[[int], None]) -> None:
        self.capacity: dict[Residency, int] = {"device": device_bytes, "host": host_bytes}
        self.held: dict[Residency, int] = {"device": 0, "host": 0}
        self.peak_device_bytes = 0
        self._holdings: dict[int, _Holding] = {}
        self._watches: dict[int, _Watch] = {}
        self._dead: deque[_Watch] = deque()
        self._settling = threading.RLock()
        self._on_free = on_free

    def storage_of(self, tensor: Tensor, purpose: str = "operators") -> int:
        """Number of the storage of `tensor`; one not seen before is held as device memory from now on.

        Raises:
            VirtualOutOfMemoryError: it does not fit.
        """
        self._settle()
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._holdings:
            self._hold(storage, key, "device", purpose)
        return key

    def hold(self, tensor: Tensor, residency: Residency, purpose: str) -> int:
        """Note a new allocation of host or device memory and return the number of its storage.

        Raises:
            VirtualOutOfMemoryError: it does not fit.
        """
        self._settle()
        storage = tensor.untyped_storage()
        self._hold(storage, storage._cdata, residency, purpose)
        return storage._cdata

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory of this device or its host."""
        self._settle()
        return tensor.untyped_storage()._cdata in self._holdings

    def residency(self, key: int) -> Residency:
        return self._holdings[key].residency

    def purpose(self, key: int) -> str:
        return self._holdings[key].purpose

    def check(self, nbytes: int, residency: Residency, what: str) -> None:
        """Raise if `nbytes` more would not fit.

        Raises:
            VirtualOutOfMemoryError: naming what is held, largest first.
        """
        self._settle()
        held, capacity = self.held[residency], self.capacity[residency]
        if held + nbytes <= capacity:
            return
        free_bytes = max(capacity - held, 0)
        holders = ", ".join(f"{purpose} {gib(amount)}" for purpose, amount in self.by_purpose(residency))
        raise VirtualOutOfMemoryError(
            f"out of {residency} memory: {what} needs {gib(nbytes)}, {gib(free_bytes)} of {gib(capacity)} is free "
            f"({holders or 'nothing'} is held); {_REMEDY[residency]}, or choose a larger profile",
            nbytes,
            free_bytes,
        )

    def by_purpose(self, residency: Residency) -> list[tuple[str, int]]:
        """Live bytes by purpose, largest first."""
        self._settle()
        totals: dict[str, int] = {}
        for holding in self._holdings.values():
            if holding.residency == residency:
                totals[holding.purpose] = totals.get(holding.purpose, 0) + holding.nbytes
        return sorted(totals.items(), key=lambda item: -item[1])

    def rename(self, key: int, purpose: str) -> None:
        """Say what an allocation turned out to be for (a buffer that was stamped is a slot)."""
        self._holdings[key].purpose = purpose

    def free(self, residency: Residency) -> FreeMemory:
        self._settle()
        capacity = self.capacity[residency]
        return FreeMemory(max(capacity - self.held[residency], 0), capacity)

    def _hold(self, storage: torch.UntypedStorage, key: int, residency: Residency, purpose: str) -> None:
        nbytes = storage.nbytes()
        self.check(nbytes, residency, purpose)
        self._holdings[key] = _Holding(nbytes, residency, purpose)
        watch = _Watch(storage, self._dead.append)
        watch.key = key
        self._watches[key] = watch
        self.held[residency] += nbytes
        if residency == "device" and self.held["device"] > self.peak_device_bytes:
            self.peak_device_bytes = self.held["device"]

    def _settle(self) -> None:
        """Give up what died since the last question; if that is interrupted, the next question goes on with it."""
        if not self._dead:
            return
        with self._settling:
            while self._dead:
                key = self._dead[0].key
                if key in self._holdings:
                    self._on_free(key)
                    holding = self._holdings[key]
                    self.held[holding.residency] -= holding.nbytes
                    del self._holdings[key], self._watches[key]
                self._dead.popleft()
