"""What the kernel bench measures: shapes, the ways to compute them, the bytes of each way and its least time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from offload.errors import OffloadConfigError
from offload_kernels import choose_schedule
from offload_kernels.tiles import SKINNY_ROWS

KERNELS = ("skinny", "wide", "staged")
BASELINES = {
    "resident": "torch on a weight in device memory",
    "view": "F.linear on a device view of the host weight",
    "copy": "the weight copied whole, then torch",
}
_BY_COPY_ENGINE = ("staged", "copy")
TARGETS = {"skinny": ("sm", 0.95), "wide": ("sm", 0.95), "staged": ("ce", 0.93)}  # share of the rate, for ...
TARGET_BYTES = 32_000_000  # ... weights of this size and up, and for wide up to ...
TARGET_WIDE_ROWS = 2048


class Link(Protocol):
    """Rates of the bus in bytes/s, as `LinkRates` and a hardware profile have them."""

    @property
    def sm_bytes_per_s(self) -> float: ...

    @property
    def ce_bytes_per_s(self) -> float: ...


class Device(Link, Protocol):
    """A hardware profile: the bus, device memory and matrix products."""

    @property
    def hbm_bytes_per_s(self) -> float: ...

    @property
    def half_flops_per_s(self) -> float: ...

    @property
    def single_flops_per_s(self) -> float: ...


@dataclass(frozen=True)
class Case:
    """One product of x (M, K) with a weight (N, K), computed one way: a schedule or a baseline."""

    M: int
    N: int
    K: int
    dtype: torch.dtype
    way: str

    @property
    def weight_bytes(self) -> int:
        return self.N * self.K * self.dtype.itemsize

    @property
    def bus_bytes(self) -> int:
        """Bytes over the bus: each of the weight once (for `view` that is the least; torch may read it more often)."""
        return 0 if self.way == "resident" else self.weight_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory: x, the result, and the weight where it passes through."""
        passes = {"resident": 1, "copy": 2, "staged": 2, "wide": 2}.get(self.way, 0)
        return (self.M * (self.N + self.K)) * self.dtype.itemsize + passes * self.weight_bytes

    @property
    def link(self) -> str:
        """Which rate of the bus limits this way: kernel loads (sm) or the copy engine (ce)."""
        return "ce" if self.way in _BY_COPY_ENGINE else "sm"

    def bus_s(self, link: Link) -> float:
        """Least time on the bus."""
        return self.bus_bytes / rate(link, self.link)

    def bound_s(self, device: Device) -> float:
        """Least time: of the bus, device memory and the tensor cores, whichever takes longest."""
        peak = device.single_flops_per_s if self.dtype is torch.float32 else device.half_flops_per_s
        return max(self.bus_s(device), self.device_bytes / device.hbm_bytes_per_s, 2 * self.M * self.N * self.K / peak)

    def is_choice(self, link: Link | None) -> bool:
        """Whether `linear` takes this way without a schedule (and, with a link, given its rates)."""
        return self.way == choose_schedule(self.M, self.N, self.K, self.dtype, link)


def rate(link: Link, name: str) -> float:
    """The rate of the bus called `sm` or `ce`."""
    return {"sm": link.sm_bytes_per_s, "ce": link.ce_bytes_per_s}[name]


def cases(rows: Sequence[int], shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Iterator[Case]:
    """Every shape with every number of rows, each way that takes it.

    Raises:
        OffloadConfigError: a number of rows is not positive.
    """
    if min(rows) < 1:
        raise OffloadConfigError(f"--rows {min(rows)}: a product without rows reads nothing, give 1 or more")
    for N, K in shapes:
        for M in rows:
            for way in (*KERNELS, *BASELINES):
                if way != "skinny" or M <= SKINNY_ROWS:
                    yield Case(M, N, K, dtype, way)


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """`"4096x4096,14336x4096"` -> [(N, K), ...].

    Raises:
        OffloadConfigError: not such a list.
    """
    shapes = [tuple(part.split("x")) for part in text.split(",")]
    if any(len(shape) != 2 or not all(size.isdecimal() and int(size) for size in shape) for shape in shapes):
        raise OffloadConfigError(f"--shapes {text!r} is no list of shapes NxK, such as 4096x4096,14336x4096")
    return [(int(N), int(K)) for N, K in shapes]


@dataclass(frozen=True)
class Measured:
    """One case with every repetition's time, in seconds, and the rates of the link in the same run."""

    case: Case
    samples_s: tuple[float, ...]
    sm_bytes_per_s: float
    ce_bytes_per_s: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def weight_bytes_per_s(self) -> float:
        """Bytes of the weight over the time: the useful rate of the bus."""
        return self.case.weight_bytes / self.median_s

    def share(self, link: str) -> float | None:
        """Of the rate of kernel loads (sm) or of the copy engine (ce); None if the weight does not cross the bus."""
        return self.weight_bytes_per_s / rate(self, link) if self.case.bus_bytes else None

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON values."""
        return {
            **asdict(self.case),
            "dtype": str(self.case.dtype).removeprefix("torch."),
            "weight_bytes": self.case.weight_bytes,
            "median_s": self.median_s,
            "weight_bytes_per_s": self.weight_bytes_per_s,
            "share_of_sm": self.share("sm"),
            "share_of_ce": self.share("ce"),
            "samples_s": list(self.samples_s),
        }


def verdicts(rows: Sequence[Measured]) -> list[str]:
    """What fell short of the targets, one line each."""
    by_case = {(row.case.M, row.case.N, row.case.K, row.case.way): row for row in rows}
    found = []
    for row in rows:
        case = row.case
        if case.way not in TARGETS:
            continue
        what = f"{case.way} at M={case.M}, weight {case.N} x {case.K}"
        link, target = TARGETS[case.way]
        share = row.share(link)
        held = case.weight_bytes >= TARGET_BYTES and (case.way != "wide" or case.M <= TARGET_WIDE_ROWS)
        if held and share is not None and share < target:
            found.append(f"{what}: {share:.3f} of the {link} rate, the target is {target}")
        view = by_case.get((case.M, case.N, case.K, "view"))
        if case.is_choice(None) and view and row.median_s > view.median_s:
            found.append(
                f"{what}: {row.median_s * 1e3:.3g} ms, slower than F.linear on a view, {view.median_s * 1e3:.3g} ms"
            )
    return found
