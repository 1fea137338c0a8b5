"""What one operator does: tensors read and written with the bytes moved for each, and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from offload.virtual.memory import MemoryAccount
from offload.virtual.operators import byte_range, unique_bytes
from offload.virtual.profiles import Profile
from offload.virtual.races import Range

Moved = list[tuple[Tensor, int]]


@dataclass
class Work:
    """What one operator does.

    Attributes:
        reads, writes: tensor and the bytes moved for it.
        flops: multiply and add count as two.
        single: True if the FLOPs are in 32-bit floats.
        host_passes: how often bytes that live on the host cross the bus.
        host_link: whether kernel loads or the copy engine bring them.
        host_staged: they are written to device memory and read from there.
    """

    reads: Moved = field(default_factory=list)
    writes: Moved = field(default_factory=list)
    flops: int = 0
    single: bool = False
    host_passes: int = 1
    host_link: Literal["sm", "ce"] = "sm"
    host_staged: bool = False


def moved(tensors: list[Tensor]) -> Moved:
    """Every tensor with all of its bytes."""
    return [(tensor, unique_bytes(tensor)) for tensor in tensors]


def is_single(tensor: Tensor) -> bool:
    """Whether products of this tensor run at the 32-bit rate."""
    return tensor.itemsize >= 4


def demands_of(work: Work, account: MemoryAccount, profile: Profile) -> tuple[dict[str, int], list[Range], list[Range]]:
    """Turn work into demands on the resources, and into the byte ranges that are read and written.

    Args:
        work: of one operator.
        account: knows which storages are host memory.
        profile: 32-bit FLOPs are scaled to the time that they take at the 16-bit rate.
    """
    demands = {"sm": 0, "ce": 0, "hbm": 0, "flops": work.flops}
    if work.single:
        demands["flops"] = -(-work.flops * profile.half_flops_per_s // profile.single_flops_per_s)
    reads, writes = [], []
    for tensor, nbytes in work.reads:
        storage = account.storage_of(tensor)
        reads.append((storage, *byte_range(tensor)))
        if account.residency(storage) == "host":
            demands[work.host_link] += nbytes * work.host_passes
            demands["hbm"] += 2 * nbytes if work.host_staged else 0
        else:
            demands["hbm"] += nbytes
    for tensor, nbytes in work.writes:
        storage = account.storage_of(tensor)
        writes.append((storage, *byte_range(tensor)))
        demands["sm" if account.residency(storage) == "host" else "hbm"] += nbytes
    return demands, reads, writes
