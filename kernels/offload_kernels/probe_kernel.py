"""A kernel that only reads: what the link gives to loads, with nothing else in the way."""

import torch
import triton
import triton.language as tl

from offload_kernels import runtime
from offload_kernels.tiles import Specialisation

ROW_BYTES = 8192  # 4096 columns of bf16; a constant, so that loads are 16 bytes wide
TILE_BYTES = 16 << 10  # of one step of one program, as in the kernels of `linear`
WARPS = 4
WORD_BYTES = 4


@triton.jit(do_not_specialize=["rows"])
def probe_kernel(
    words_ptr, sums_ptr,
    rows,
    ROW_WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program reads blocks of BLOCK_R rows, BLOCK_W words of each at a time, and adds them up modulo 2^32."""
    acc = tl.zeros((BLOCK_R, BLOCK_W), dtype=tl.int32)
    offs = tl.arange(0, BLOCK_R)[:, None] * ROW_WORDS + tl.arange(0, BLOCK_W)[None, :]
    for first in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        block_ptr = words_ptr + tl.cast(first, tl.int64) * ROW_WORDS
        mask = first + tl.arange(0, BLOCK_R) < rows
        for column in tl.range(0, ROW_WORDS, BLOCK_W, num_stages=STAGES):
            acc += tl.load(block_ptr + column + offs, mask=mask[:, None], other=0)  # [BLOCK_R, BLOCK_W]
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.sum(acc.to(tl.int64), axis=1), axis=0))


def constants(request_bytes: int, stages: int) -> dict[str, int]:
    """The compile-time constants: a tile of `TILE_BYTES` whose rows are one request long."""
    return {
        "ROW_WORDS": ROW_BYTES // WORD_BYTES,
        "BLOCK_R": TILE_BYTES // request_bytes,
        "BLOCK_W": request_bytes // WORD_BYTES,
        "STAGES": stages,
    }


def specialise(request_bytes: int, stages: int) -> Specialisation:
    """What the compiler is told about `probe_kernel`."""
    consts = constants(request_bytes, stages)
    signature = {"words_ptr": "*i32", "sums_ptr": "*i64", "rows": "i32"}
    signature |= dict.fromkeys(consts, "constexpr")
    return Specialisation("probe_kernel", signature, consts, ("words_ptr", "sums_ptr"), WARPS, stages)


def read(words: torch.Tensor, sums: torch.Tensor, request_bytes: int, stages: int) -> None:
    """Read all of ``words`` once and leave one sum a program.

    Args:
        words: (rows, ROW_BYTES / 4) int32, contiguous: a device view of page-locked memory, or device memory; on the
            CPU the interpreter reads it.
        sums: (programs,) int64 beside the reader.
        request_bytes: Contiguous bytes that are asked for at a time.
        stages: Depth of the pipeline.
    """
    with runtime.on_device(sums.device):
        probe_kernel[(sums.numel(),)](
            words, sums, len(words), **constants(request_bytes, stages), num_warps=WARPS, num_stages=stages
        )
