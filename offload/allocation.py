"""One piece of device memory, given up on purpose and then asked whether it really went.

Weights are views of a few large allocations. Dropping our own reference frees an allocation only if no view of it is
alive elsewhere, so what is left over is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offload.device import Device
from offload.plan import aligned
from offload.weights import Weight


class Allocation:
    """Device memory of `nbytes`, as uint8 (nbytes,) in `memory` until it is released.

    Args:
        device: whose memory.
        nbytes: size; the device is not asked for 0 bytes.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        empty = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
        self.memory: Tensor | None = device.allocate_device(nbytes) if nbytes else empty
        self._storage = StorageWeakRef(self.memory.untyped_storage())
        self._nbytes = nbytes

    def release(self) -> None:
        """Give up our own reference; the memory goes with its last view."""
        self.memory = None

    @property
    def nbytes(self) -> int:
        """Bytes that are still allocated."""
        return 0 if self._storage.expired() else self._nbytes


def view(buffer: Tensor, offset_bytes: int, weight: Weight) -> Tensor:
    """Return the tensor that looks at a weight's bytes, from `offset_bytes` of a uint8 buffer."""
    flat = buffer[offset_bytes : offset_bytes + weight.nbytes].view(weight.dtype)
    return flat.view(weight.shape) if weight.strides is None else flat.as_strided(weight.shape, weight.strides)


def laid_out(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Place tensors one after another, each on a full line of 128 bytes; returns their offsets and the total."""
    offsets_bytes, end = [], 0
    for nbytes in sizes_bytes:
        offsets_bytes.append(end)
        end += aligned(nbytes)
    return offsets_bytes, end
