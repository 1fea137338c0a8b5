"""What a GPU does apart from its link: device memory, matrix products, and what starting an operator costs.

Rates come from GPU events around work that is large enough to be nothing else; costs of starting come from many tiny
operators. They fill a hardware profile, so that a virtual GPU behaves as this one does, not as its data sheet says.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload_kernels.link import median_s

COPY_BYTES = 2 << 30
HALF_SIZE, SINGLE_SIZE = 8192, 4096
TINY_OPERATORS = 500
"""Fewer than the launches that a stream holds before it makes the host wait (1024)."""


@dataclass(frozen=True)
class GpuRates:
    """The numbers of a profile that are not its link's; rates per second, times in seconds."""

    hbm_bytes_per_s: int
    half_flops_per_s: int
    single_flops_per_s: int
    kernel_s: float
    copy_s: float
    issue_s: float
    graph_issue_s: float


def measure(device: torch.device, repetitions: int = 5) -> GpuRates:
    """Measure a CUDA GPU; takes a few seconds and 4 GiB of its memory.

    Args:
        device: CUDA device.
        repetitions: of each measurement, after one that is not counted; medians are taken.
    """
    with torch.cuda.device(device), torch.inference_mode():
        source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        memory_s = median_s(lambda: target.copy_(source), repetitions)
        tiny = target[:4].view(torch.float32)
        pinned = torch.zeros(4, dtype=torch.uint8, pin_memory=True)
        graph = torch.cuda.CUDAGraph()
        tiny.add_(1)
        with torch.cuda.graph(graph):
            _many(lambda: tiny.add_(1))
        return GpuRates(
            hbm_bytes_per_s=int(2 * COPY_BYTES / memory_s),
            half_flops_per_s=_product_rate(HALF_SIZE, torch.bfloat16, device, repetitions),
            single_flops_per_s=_product_rate(SINGLE_SIZE, torch.float32, device, repetitions),
            kernel_s=median_s(graph.replay, repetitions) / TINY_OPERATORS,
            copy_s=median_s(lambda: _many(lambda: target[:4].copy_(pinned, non_blocking=True)), repetitions)
            / TINY_OPERATORS,
            issue_s=_on_host(lambda: _many(lambda: tiny.add_(1)), repetitions) / TINY_OPERATORS,
            graph_issue_s=_on_host(graph.replay, repetitions),
        )


def _many(operator: Callable[[], object]) -> None:
    for _ in range(TINY_OPERATORS):
        operator()


def _product_rate(size: int, dtype: torch.dtype, device: torch.device, repetitions: int) -> int:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return int(2 * size**3 / median_s(lambda: left @ right, repetitions))


def _on_host(work: Callable[[], object], repetitions: int) -> float:
    """Median seconds until the host has issued the work, on a GPU that is idle before."""
    times = []
    for _ in range(repetitions + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times[1:])
