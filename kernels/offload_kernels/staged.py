"""Product from a copy: the copy engine brings a chunk of W to the device while torch multiplies the one before.

The honest baseline of the kernels, and the better choice for very many rows of x or where the copy engine is well
faster than kernel loads. Device scratch is two chunks; every byte crosses the bus once.
"""

import math
from collections.abc import Iterator

import torch

from offload_kernels import memory, runtime

# A chunk long enough that its launches vanish behind its transfer (16 MiB: 0.3 ms on PCIe 5, against some 10 us),
# short enough that the last chunk's product, which nothing hides, is a small part of the whole.
CHUNK_BYTES = 16 << 20
MIN_CHUNKS = 4  # the ring of two chunks is at most half of W


def chunks(N: int, row_bytes: int) -> list[tuple[int, int]]:
    """Cut N rows of W into ranges [first, end) of nearly equal size, at most `CHUNK_BYTES` and a quarter of W each."""
    count = min(N, max(MIN_CHUNKS, math.ceil(N * row_bytes / CHUNK_BYTES)))
    rows = math.ceil(N / count) if count else 0
    return [(first, min(first + rows, N)) for first in range(0, N, rows)] if rows else []


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write x W^T + bias to ``out``; arguments as in `skinny.run`."""
    ranges = chunks(weight.shape[0], weight.shape[1] * weight.element_size())
    with runtime.on_device(x.device):
        ring = torch.empty((2, ranges[0][1], weight.shape[1]), dtype=weight.dtype, device=x.device)
        arrived = copy_on_stream(weight, ranges, ring) if x.is_cuda else _copy_in_order(weight, ranges, ring)
        for (first, end), chunk in zip(ranges, arrived, strict=True):
            part = out[:, first:end]
            if bias is None:
                torch.mm(x, chunk.t(), out=part)
            else:
                torch.addmm(bias[first:end], x, chunk.t(), out=part)


def _copy_in_order(weight: torch.Tensor, ranges: list[tuple[int, int]], ring: torch.Tensor) -> Iterator[torch.Tensor]:
    """The ring without a copy engine: each chunk is copied when it is asked for."""
    for number, (first, end) in enumerate(ranges):
        chunk = ring[number % 2, : end - first]
        chunk.copy_(weight[first:end])
        yield chunk


def copy_on_stream(weight: torch.Tensor, ranges: list[tuple[int, int]], ring: torch.Tensor) -> Iterator[torch.Tensor]:
    """The ring by the copy engine: a chunk is yielded once the current stream waits for it, two copies run ahead.

    The side stream begins after all that was queued (the ring's memory may be another's until then) and the current
    stream waits for the last copy: a captured graph sees fork and join, and the ring may be freed as usual.
    """
    compute, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(compute)
    arrivals = [_queue(weight, rows, slot, side) for rows, slot in zip(ranges, ring, strict=False)]
    for number, (first, end) in enumerate(ranges):
        compute.wait_event(arrivals[number])
        yield ring[number % 2, : end - first]
        if number + 2 < len(ranges):
            side.wait_stream(compute)  # the chunk that was just multiplied is free
            arrivals.append(_queue(weight, ranges[number + 2], ring[number % 2], side))


def _queue(
    weight: torch.Tensor, rows: tuple[int, int], slot: torch.Tensor, side: torch.cuda.Stream
) -> torch.cuda.Event:
    """Queue the copy of a range of rows on the side stream; the event says that it arrived."""
    first, end = rows
    memory.cuda().copy_rows(slot[: end - first], weight[first:end], side)
    return side.record_event()
