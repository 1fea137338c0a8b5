"""The clock of the kernel bench: every way to compute a product, in turns, on weights that rotate in host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch
import torch.nn.functional as F

from bench.kernel_cases import Case
from offload.errors import OffloadConfigError
from offload_kernels import device_view, linear, page_lock

Call = Callable[[int], object]
_PATTERN_BYTES = 64 << 20
_RESIDENT_BYTES = 1 << 30  # several times any L2


class HostPool:
    """Page-locked host memory full of weights: successive calls read different ones, as the layers of a model do.

    Kernel loads lose rate with the footprint (an A100 from 25 to 16.5 GB/s at 20 GiB), so a small pool flatters.

    Args:
        size_bytes: Of the pool.
    """

    def __init__(self, size_bytes: int) -> None:
        pattern = torch.randn(_PATTERN_BYTES // 2, dtype=torch.float32).mul_(0.05).to(torch.bfloat16).view(torch.uint8)
        self._slab = torch.empty(size_bytes, dtype=torch.uint8)
        for part in self._slab.split(pattern.numel()):
            part.copy_(pattern[: part.numel()])
        self._lock = page_lock(self._slab)

    def weights(self, N: int, K: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """As many (N, K) weights as fit, page-locked, each on a line of 128 bytes."""
        size = N * K * dtype.itemsize
        step = -(-size // 128) * 128
        firsts = range(-self._slab.data_ptr() % 128, self._slab.numel() - size + 1, step)
        if not firsts:
            raise OffloadConfigError(
                f"a weight of {size} bytes does not fit a pool of {self._slab.numel()}: raise --pool-gib"
            )
        return [self._slab[first : first + size].view(dtype).view(N, K) for first in firsts]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.synchronize()
        self._lock.close()


def calls(case: Case, pool: HostPool, device: torch.device) -> Call:
    """A function of the call's number that computes the case with the next weight."""
    x = torch.randn(case.M, case.K, device=device).to(case.dtype)
    host = pool.weights(case.N, case.K, case.dtype)
    if case.way == "resident":
        count = max(1, min(len(host), _RESIDENT_BYTES // case.weight_bytes))
        resident = [weight.to(device) for weight in host[:count]]
        return lambda number: F.linear(x, resident[number % count])
    if case.way == "copy":
        buffer = torch.empty(case.N, case.K, dtype=case.dtype, device=device)
        return lambda number: F.linear(x, buffer.copy_(host[scattered(number, len(host))], non_blocking=True))
    views = [device_view(weight, device) for weight in host]
    if case.way == "view":
        return lambda number: F.linear(x, views[scattered(number, len(views))])
    return lambda number: linear(x, views[scattered(number, len(views))], schedule=case.way)


def scattered(number: int, count: int) -> int:
    """The weight of a call: all in turn, in large strides, so that even a few calls have the footprint of the pool."""
    stride = int(0.618 * count) or 1
    while math.gcd(stride, count) > 1:
        stride += 1
    return number * stride % count


def time_on_device(todo: Sequence[Callable[[], object]]) -> list[float]:
    """Queue all calls without a pause, then read the time of each, in seconds, between two events around it."""
    marks = []
    for call in todo:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in marks]


def interleaved(
    ways: Sequence[Call], repetitions: int, clock: Callable[[Sequence[Callable[[], object]]], list[float]]
) -> list[tuple[float, ...]]:
    """Time each way `repetitions` times, in turns, so that what disturbs the machine disturbs all alike.

    Args:
        ways: Functions of the call's number.
        repetitions: Times for each; one more, the first, warms up and is left out.
        clock: Seconds of each of a sequence of calls, such as `time_on_device`.

    Returns:
        For each way its times in seconds.
    """
    samples: list[list[float]] = [[] for _ in ways]
    number = 0
    for turn in range(repetitions + 1):
        todo = []
        for way in ways:
            todo.append(lambda way=way, number=number: way(number))
            number += 1
        for kept, seconds in zip(samples, clock(todo), strict=True):
            if turn:
                kept.append(seconds)
    return [tuple(kept) for kept in samples]
