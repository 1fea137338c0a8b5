"""Where a kernel is about to run: the interpreter or a GPU of some architecture, and what that means for its launch."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from offload_kernels.tiles import INTERPRETER, LINE_BYTES, Tile

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

# Bytes to keep on their way over the link. Needed are bandwidth x latency: about 60 KiB on PCIe 5, 335 KiB on
# NVLink-C2C; three times the latter saturates either, and more would only queue in front of other traffic on the bus.
IN_FLIGHT_BYTES = 1 << 20

_INTERPRETED_PROGRAMS = 8
VECTOR_BYTES = 16  # widest load of one thread


@cache
def interpreting() -> bool:
    """Whether this process runs Triton kernels in the interpreter (``TRITON_INTERPRET=1`` when triton was imported)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def demand_runnable(schedule: str, device: torch.device) -> None:
    """Refuse a Triton schedule on the CPU outside of the interpreter.

    Raises:
        RuntimeError: The kernel cannot run in this process.
    """
    if device.type != "cpu" or schedule == "staged":
        return
    if find_spec("triton") is None:
        raise RuntimeError(f"schedule {schedule!r} is a Triton kernel, and triton is not installed: pip install triton")
    if not interpreting():
        raise RuntimeError(
            f"schedule {schedule!r} on CPU tensors runs in Triton's interpreter: set TRITON_INTERPRET=1 before triton "
            "is imported, or pass schedule=None for torch's product"
        )


@cache
def arch_of(device: torch.device) -> int:
    """Compute capability of a CUDA device as an integer (90 for sm_90); `INTERPRETER` for the CPU."""
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def processors_of(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small constant for the interpreter."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def saturating_programs(tile: Tile, element_bytes: int) -> int:
    """How many programs of this tile keep `IN_FLIGHT_BYTES` on the link (in the interpreter: a small constant)."""
    in_flight_bytes = tile.in_flight_bytes(element_bytes)
    return math.ceil(IN_FLIGHT_BYTES / in_flight_bytes) if in_flight_bytes else _INTERPRETED_PROGRAMS


@dataclass(frozen=True)
class Units:
    """Numbers of elements, up to 16 bytes of them, that divide row strides and K.

    Triton judges divisibility by 16 on the value of an integer argument, so a bf16 row stride of 8200 would be loaded
    by 2 bytes, and each new value may compile anew. Kernels take ``stride // unit`` instead and multiply by the
    constant ``unit``: loads of 16, 8, 4 or 2 bytes, and one compiled kernel for all strides of a kind.

    Args:
        w: Divides the row stride of the weight.
        x: Divides the row stride of x.
        k: Divides K.
        vector: Elements in 16 bytes: what rows that we lay out ourselves are a multiple of.
    """

    w: int
    x: int
    k: int
    vector: int

    @classmethod
    def of(cls, x: torch.Tensor, weight: torch.Tensor) -> "Units":
        """Those of x (M, K) and weight (N, K)."""
        vector = VECTOR_BYTES // x.element_size()
        return cls(*(math.gcd(n, vector) for n in (weight.stride(-2), x.stride(-2), x.shape[-1])), vector)

    @classmethod
    def assumed(cls, dtype: torch.dtype, aligned: bool) -> "Units":
        """Those of weight rows on 16 bytes, or of rows about which nothing is known; x is seen to by `aligned_rows`."""
        vector = VECTOR_BYTES // dtype.itemsize
        return cls(vector, vector, vector, vector) if aligned else cls(1, vector, 1, vector)

    def constants(self) -> dict[str, int]:
        """The compile-time constants that kernels take."""
        return {"W_UNIT": self.w, "X_UNIT": self.x, "K_UNIT": self.k}


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """x (M, K) itself if its rows begin on 16 bytes and have unit stride, else a copy with padded rows that do.

    Loads of x by 2 bytes cost registers: they make kernels spill, whose weight would otherwise arrive at full speed.
    Rows farther apart than 32 bits count, such as the last positions of very long sequences, are copied too.
    """
    vector, step = VECTOR_BYTES // x.element_size(), x.stride(0)
    if x.stride(1) == 1 and step % vector == 0 and step < 1 << 31 and x.data_ptr() % VECTOR_BYTES == 0:
        return x
    M, K = x.shape
    rows = x.new_empty(M, math.ceil(K / vector) * vector)[:, :K]
    rows.copy_(x)
    return rows


def line_elements(element_bytes: int) -> int:
    """Elements in one full line on the bus."""
    return LINE_BYTES // element_bytes


def kernel_out(out: torch.Tensor) -> torch.Tensor:
    """Where a kernel should write: ``out``, but fp32 in the interpreter, whose bf16 store truncates."""
    return torch.empty_like(out, dtype=torch.float32) if interpreting() else out


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which a launch goes to ``device``: Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
