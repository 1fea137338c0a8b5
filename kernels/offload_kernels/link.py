"""What the bus between host memory and the GPU does, as kernel loads see it and as the copy engine does.

The two differ: on many machines with PCIe 5 kernel loads reach two thirds of the copy engine's rate, on others nearly
all of it, and both fall with the footprint. So they are measured, on the machine and with the programs, pipeline and
requests that the kernels use. A rate is read from GPU events around the whole footprint, the median of a few
repetitions.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offload_kernels.memory import device_view, page_lock

ROW_BYTES = 8192  # of the matrix that the probe's kernel reads
_COPY_BYTES = 256 << 20
_MOST_REQUEST_BYTES = 2048  # four steps a row: below that nothing is pipelined
_WORD = 1 << 32
_BLOCK_WORDS = 1 << 24


@dataclass(frozen=True)
class Measurement:
    """One point: how it was read, and how fast.

    Args:
        engine: ``sm`` (kernel loads) or ``ce`` (copy engine).
        footprint_bytes: Host memory that was read, each byte once.
        programs, stages, request_bytes: How kernel loads were made; 0 for the copy engine.
        seconds: Median time.
        bytes_per_s: ``footprint_bytes / seconds``.
    """

    engine: str
    footprint_bytes: int
    programs: int
    stages: int
    request_bytes: int
    seconds: float
    bytes_per_s: float


@dataclass(frozen=True)
class LinkRates:
    """Rates of the link, in bytes per second.

    Args:
        sm_bytes_per_s: The best of kernel loads at the largest footprint.
        ce_bytes_per_s: The copy engine at the largest footprint.
        measurements: Every point behind them.
    """

    sm_bytes_per_s: float
    ce_bytes_per_s: float
    measurements: tuple[Measurement, ...] = ()


def probe(
    device: torch.device | str = "cuda",
    *,
    footprint_bytes: Sequence[int] = (256 << 20, 4 << 30),
    programs: Sequence[int] = (2, 8, 22, 64),
    stages: Sequence[int] = (4,),
    request_bytes: Sequence[int] = (64, 128, 512),
    repetitions: int = 3,
) -> LinkRates:
    """Measure the link: kernel loads over the cross product of the arguments, and the copy engine beside them.

    Locks ``max(footprint_bytes)`` of host memory while it runs. With the defaults some 60 GB are read; weights rotate
    through more memory than 4 GiB, so pass 16 GiB or more to see what they will get.

    Args:
        device: CUDA device.
        footprint_bytes: Host memory to read, multiples of 1 MiB.
        programs: Numbers of programs that read at the same time; 22 of them with 4 stages keep 1 MiB on its way.
        stages: Depths of the pipeline of a program.
        request_bytes: Contiguous bytes asked for at a time: powers of two from 32 to 2048. Below 128 a line is split.
        repetitions: Timed runs of each point, after one that is not.

    Returns:
        The rates and all measurements.

    Raises:
        RuntimeError: There is no CUDA GPU, or a checksum differs from the CPU's.
        ValueError: A size is not one of those above.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise RuntimeError(
            f"probe measures the link of a CUDA GPU, and {device} is none or not here: run it where there is one"
        )
    _check_sizes(footprint_bytes, programs, stages, request_bytes, repetitions)
    host = host_words(max(footprint_bytes))
    with torch.cuda.device(device), page_lock(host):
        view = device_view(host, device)
        found = []
        for size in footprint_bytes:
            words = view[: size // ROW_BYTES]
            expected = checksum(host[: size // ROW_BYTES])
            for count in programs:
                for depth in stages:
                    for request in request_bytes:
                        found.append(_measure_loads(words, expected, count, depth, request, repetitions))
            found.append(_measure_copies(host[: size // ROW_BYTES], device, repetitions))
        torch.cuda.synchronize()
        del view, words
    return rates_of(found)


def rates_of(found: Sequence[Measurement]) -> LinkRates:
    """The rates behind measurements: the fastest of each engine at the largest footprint."""
    largest = max(point.footprint_bytes for point in found)
    best = {
        engine: max(p.bytes_per_s for p in found if p.engine == engine and p.footprint_bytes == largest)
        for engine in ("sm", "ce")
    }
    return LinkRates(best["sm"], best["ce"], tuple(found))


def host_words(size_bytes: int) -> torch.Tensor:
    """Host memory whose words count up, modulo 2^32, so that up to 16 GiB all differ: (rows, row words) int32."""
    words = torch.empty((size_bytes // ROW_BYTES, ROW_BYTES // 4), dtype=torch.int32)
    flat, block = words.view(-1), torch.arange(min(words.numel(), _BLOCK_WORDS), dtype=torch.int32)
    for first in range(0, flat.numel(), _BLOCK_WORDS):
        part = flat[first : first + _BLOCK_WORDS]
        torch.add(block[: part.numel()], as_signed(first), out=part)
    return words


def as_signed(word: int) -> int:
    """A word modulo 2^32 as int32 has it."""
    return (word + _WORD // 2) % _WORD - _WORD // 2


def checksum(words: torch.Tensor) -> int:
    """Sum of all words modulo 2^32, on the CPU."""
    return sum(int(part.sum(dtype=torch.int64)) for part in words.split(65536)) % _WORD


def read_checksum(words: torch.Tensor, programs: int, request_bytes: int, stages: int, device: torch.device) -> int:
    """The same sum from the probe's own kernel: proof that it read every word once."""
    from offload_kernels import probe_kernel

    sums = torch.empty(programs, dtype=torch.int64, device=device)
    probe_kernel.read(words, sums, request_bytes, stages)
    return int(sums.sum()) % _WORD


def _measure_loads(
    words: torch.Tensor, expected: int, programs: int, stages: int, request_bytes: int, repetitions: int
) -> Measurement:
    from offload_kernels import probe_kernel

    got = read_checksum(words, programs, request_bytes, stages, words.device)
    if got != expected:
        raise RuntimeError(f"the probe read {got:#x} where the host has {expected:#x}: the link cannot be trusted")
    sums = torch.empty(programs, dtype=torch.int64, device=words.device)
    seconds = median_s(lambda: probe_kernel.read(words, sums, request_bytes, stages), repetitions)
    size = words.numel() * words.element_size()
    return Measurement("sm", size, programs, stages, request_bytes, seconds, size / seconds)


def _measure_copies(host: torch.Tensor, device: torch.device, repetitions: int) -> Measurement:
    rows = _COPY_BYTES // ROW_BYTES
    target = torch.empty((min(rows, len(host)), host.shape[1]), dtype=host.dtype, device=device)

    def copy_all() -> None:
        for part in host.split(rows):
            target[: len(part)].copy_(part, non_blocking=True)

    copy_all()
    seconds = median_s(copy_all, repetitions)
    size = host.numel() * host.element_size()
    return Measurement("ce", size, 0, 0, 0, seconds, size / seconds)


def median_s(work: Callable[[], None], repetitions: int) -> float:
    """Median seconds between two events around ``work``, on the current stream."""
    times = []
    for _ in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _check_sizes(
    footprint_bytes: Sequence[int],
    programs: Sequence[int],
    stages: Sequence[int],
    request_bytes: Sequence[int],
    repetitions: int,
) -> None:
    for size in footprint_bytes:
        if size < 1 << 20 or size % (1 << 20):
            raise ValueError(f"footprint_bytes={size} is not a multiple of 1 MiB")
    for request in request_bytes:
        if not 32 <= request <= _MOST_REQUEST_BYTES or request & (request - 1):
            raise ValueError(f"request_bytes={request} is not a power of two from 32 to {_MOST_REQUEST_BYTES}")
    for name, values in (("programs", programs), ("stages", stages), ("repetitions", (repetitions,))):
        if not values or min(values) < 1:
            raise ValueError(f"{name} must be 1 or more, got {values}")
    if not footprint_bytes or not request_bytes:
        raise ValueError("footprint_bytes and request_bytes need at least one value")
