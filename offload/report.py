"""What memory a loaded model holds: bytes reported are bytes allocated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one loaded model; every field counts allocated bytes, rounding included.

    Attributes:
        requested_bytes: the budget of the configuration (0 where a backend has none).
        offloaded_bytes: weights that live on the host, without padding.
        locked_bytes: host memory that was reserved and page-locked for them.
        resident_bytes: device memory for the weights that stay.
        slot_bytes: device memory of the prefetch slots.
        staging_bytes: device memory through which host vectors pass once per use.
        kv_bytes: device memory of the key-value cache.
        survivors: names of weights whose memory is still alive after `close()`.
    """

    requested_bytes: int = 0
    offloaded_bytes: int = 0
    locked_bytes: int = 0
    resident_bytes: int = 0
    slot_bytes: int = 0
    staging_bytes: int = 0
    kv_bytes: int = 0
    survivors: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> int:
        """Device memory of weights, slots, staging and key-value cache together."""
        return self.resident_bytes + self.slot_bytes + self.staging_bytes + self.kv_bytes
