"""Product with many rows of x: a program copies its rows of W to device memory, then multiplies them with all of x.

An ordinary tiled product would read W once per tile of rows of x. Here the bus carries each row of W once, into the
program's own slot of a ring in device memory, whose second reads are cheap (2-3 % of the bus time on PCIe). No
partial sums are needed.

Copying and multiplying alternate in one program, and programs must not do so in step, or the bus would idle while all
of them multiply. The tiles of program p are therefore shifted by the fraction p / programs of a tile, which spreads
the phases evenly. Nothing hides the product with the last tile, so the share of the link falls as M approaches N.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from offload_kernels import runtime
from offload_kernels.skinny import accumulate
from offload_kernels.tiles import Specialisation, WideTile, pick

_INTEGERS = ["M", "N", "k_units", "rows_per_program", "w_stride", "x_stride", "out_stride", "ring_stride"]


@triton.jit
def copy_rows(
    slot_rows, w_rows, mask_n, K,
    W_UNIT: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Copy rows of W over the bus into a slot; rows outside ``mask_n`` become zeros, without a read."""
    offs_k = tl.arange(0, BLOCK_K)
    for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
        k = step * BLOCK_K
        w = tl.load(w_rows + (k + offs_k)[None, :], mask=mask_n[:, None], other=0.0)  # [BLOCK_N, BLOCK_K]
        tl.store(slot_rows + (k + offs_k)[None, :], w)
    if K % BLOCK_K != 0:
        offs_t = K // BLOCK_K * BLOCK_K + offs_k
        mask_k = offs_t < K
        w = tl.load(w_rows + offs_t[None, :], mask=mask_n[:, None] & mask_k[None, :], other=0.0)
        tl.store(slot_rows + offs_t[None, :], w, mask=mask_k[None, :])


@triton.jit(do_not_specialize=_INTEGERS)
def wide_kernel(
    w_ptr, x_ptr, bias_ptr, ring_ptr, out_ptr,
    M, N, k_units, rows_per_program,
    w_stride, x_stride, out_stride, ring_stride,
    HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    W_UNIT: tl.constexpr, X_UNIT: tl.constexpr, K_UNIT: tl.constexpr, RING_UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, COPY_STAGES: tl.constexpr,
):  # fmt: skip
    """Program p owns ``rows_per_program`` rows of W and slot p of the ring: BLOCK_N rows of K, padded to lines."""
    K = k_units * K_UNIT
    pid = tl.program_id(0)
    first_row = pid * rows_per_program
    end_row = tl.minimum(first_row + rows_per_program, N)
    shift = pid * BLOCK_N // tl.num_programs(0)
    lanes = tl.arange(0, BLOCK_N)
    every_lane = lanes < BLOCK_N
    slot = pid * BLOCK_N + lanes
    slot_rows = ring_ptr + slot.to(tl.int64)[:, None] * (ring_stride * RING_UNIT)
    for start in range(first_row - shift, end_row, BLOCK_N):
        offs_n = start + lanes
        mask_n = (offs_n >= first_row) & (offs_n < end_row)
        w_rows = w_ptr + offs_n.to(tl.int64)[:, None] * (w_stride * W_UNIT)
        copy_rows(slot_rows, w_rows, mask_n, K, W_UNIT, BLOCK_K, COPY_STAGES)
        tl.debug_barrier()  # other threads of this program read what this one wrote
        for start_m in range(0, M, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            mask_m = offs_m < M
            x_rows = x_ptr + offs_m.to(tl.int64)[None, :] * (x_stride * X_UNIT)
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            steps = tl.cdiv(K, BLOCK_K)
            acc = accumulate(acc, slot_rows, x_rows, every_lane, mask_m, 0, steps, K, BLOCK_K, STAGES, UPCAST)
            if HAS_BIAS:
                acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
            out_rows = out_ptr + offs_m.to(tl.int64)[None, :] * out_stride
            mask = mask_n[:, None] & mask_m[None, :]
            tl.store(out_rows + offs_n[:, None], acc.to(out_ptr.dtype.element_ty), mask=mask)
        tl.debug_barrier()  # nobody reads the slot any more: the next rows may overwrite it


@dataclass(frozen=True)
class Launch:
    """How the rows of W are cut: ``programs`` programs of ``rows_per_program`` rows, and the ring they need."""

    programs: int
    rows_per_program: int
    ring_shape: tuple[int, int]


def plan(tile: WideTile, N: int, K: int, element_bytes: int, processors: int) -> Launch:
    """Cut W among programs: at most one per processor, two tiles or more for each, so the ring is at most half of W.

    (A W of fewer than four tiles, which is smaller than what one program streams in passing, gets one program.)
    """
    programs = max(1, min(processors, N // (2 * tile.block_n)))
    rows_per_program = math.ceil(N / programs)
    line = runtime.line_elements(element_bytes)
    return Launch(
        math.ceil(N / rows_per_program), rows_per_program, (programs * tile.block_n, math.ceil(K / line) * line)
    )


def constants(tile: WideTile, *, bias: bool, upcast: bool, units: runtime.Units) -> dict[str, Any]:
    """The compile-time constants of `wide_kernel`."""
    return {
        "HAS_BIAS": bias, "UPCAST": upcast, **units.constants(), "RING_UNIT": units.vector,
        "BLOCK_N": tile.block_n, "BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k,
        "STAGES": tile.stages, "COPY_STAGES": tile.copy_stages,
    }  # fmt: skip


def specialise(tile: WideTile, dtype: torch.dtype, *, aligned: bool = True, bias: bool = False) -> Specialisation:
    """What the compiler is told about `wide_kernel`; arguments as in `skinny.specialise`."""
    name = runtime.DTYPES[dtype]
    consts = constants(tile, bias=bias, upcast=False, units=runtime.Units.assumed(dtype, aligned))
    signature = {"w_ptr": f"*{name}", "x_ptr": f"*{name}", "bias_ptr": f"*{name}" if bias else "constexpr"}
    signature |= {"ring_ptr": f"*{name}", "out_ptr": f"*{name}"}
    signature |= dict.fromkeys(_INTEGERS, "i32") | dict.fromkeys(consts, "constexpr")
    divisible = (*(("w_ptr",) if aligned else ()), "x_ptr", *(("bias_ptr",) if bias else ()), "ring_ptr", "out_ptr")
    consts |= {} if bias else {"bias_ptr": None}
    return Specialisation("wide_kernel", signature, consts, divisible, tile.warps, tile.stages)


def run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, tile: WideTile | None = None
) -> None:
    """Write x W^T + bias to ``out``; arguments as in `skinny.run`, any number of rows of x."""
    (M, K), N, size = x.shape, weight.shape[0], x.element_size()
    tile = tile or pick("wide", M, size, runtime.arch_of(x.device))
    launch = plan(tile, N, K, size, runtime.processors_of(x.device))
    ring = torch.empty(launch.ring_shape, dtype=x.dtype, device=x.device)
    target = runtime.kernel_out(out)
    x = runtime.aligned_rows(x)
    units = runtime.Units.of(x, weight)
    consts = constants(tile, bias=bias is not None, upcast=runtime.interpreting(), units=units)
    with runtime.on_device(x.device):
        wide_kernel[(launch.programs,)](
            weight, x, bias, ring, target, M, N, K // units.k, launch.rows_per_program,
            weight.stride(0) // units.w, x.stride(0) // units.x, target.stride(0), ring.stride(0) // units.vector,
            **consts, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if target is not out:
        out.copy_(target)
