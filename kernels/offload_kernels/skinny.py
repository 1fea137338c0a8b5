"""Product with few rows of x: one program owns some rows of W and streams their columns over the bus, once.

W stands on the left of the product (acc[N, M] += W[N, K] x[M, K]^T), so tensor cores are fed from one row of x up.
All rows of x are in one tile, hence no byte of W is needed twice. Programs are few and persistent: enough to keep the
link full, not to flood it. When W has fewer tiles than the link needs programs, K is split into disjoint ranges, and
a second kernel adds the partial sums in a fixed order: the result has the same bits on every run.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from offload_kernels import runtime
from offload_kernels.tiles import SkinnyTile, Specialisation, pick

_INTEGERS = ["M", "N", "k_units", "splits", "steps_per_split", "w_stride", "x_stride", "out_stride"]
SUM_BLOCK = 256
MIN_STEPS = 8  # a split shorter than its pipeline never fills it


@triton.jit
def accumulate(
    acc, w_rows, x_rows, mask_n, mask_m, first, last, K,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add W[n, k] x[m, k] over the steps ``first`` to ``last`` of BLOCK_K columns, the last of which may be ragged.

    That one is peeled so that the loop has no mask on K: it keeps 16-byte asynchronous copies for any K.
    """
    offs_k = tl.arange(0, BLOCK_K)
    for step in tl.range(first, tl.minimum(last, K // BLOCK_K), num_stages=STAGES):
        k = step * BLOCK_K
        w = tl.load(w_rows + (k + offs_k)[None, :], mask=mask_n[:, None], other=0.0)  # [BLOCK_N, BLOCK_K]
        x = tl.load(x_rows + (k + offs_k)[:, None], mask=mask_m[None, :], other=0.0)  # [BLOCK_K, BLOCK_M]
        if UPCAST:
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if last * BLOCK_K > K:
        offs_t = K // BLOCK_K * BLOCK_K + offs_k
        mask_k = offs_t < K
        w = tl.load(w_rows + offs_t[None, :], mask=mask_n[:, None] & mask_k[None, :], other=0.0)
        x = tl.load(x_rows + offs_t[:, None], mask=mask_m[None, :] & mask_k[:, None], other=0.0)
        if UPCAST:
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=_INTEGERS)
def skinny_kernel(
    w_ptr, x_ptr, bias_ptr, out_ptr,
    M, N, k_units, splits, steps_per_split,
    w_stride, x_stride, out_stride,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    W_UNIT: tl.constexpr, X_UNIT: tl.constexpr, K_UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One task is a tile of BLOCK_N rows of W and one range of K; SPLIT writes fp32 partial sums [splits, M, N]."""
    K = k_units * K_UNIT
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    x_rows = x_ptr + offs_m.to(tl.int64)[None, :] * (x_stride * X_UNIT)
    for task in range(tl.program_id(0), tl.cdiv(N, BLOCK_N) * splits, tl.num_programs(0)):
        split = task % splits
        offs_n = task // splits * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        w_rows = w_ptr + offs_n.to(tl.int64)[:, None] * (w_stride * W_UNIT)
        first = split * steps_per_split
        last = tl.minimum(first + steps_per_split, tl.cdiv(K, BLOCK_K))
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        acc = accumulate(acc, w_rows, x_rows, mask_n, mask_m, first, last, K, BLOCK_K, STAGES, UPCAST)
        if HAS_BIAS and not SPLIT:
            acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        out_rows = out_ptr + (split * M + offs_m).to(tl.int64)[None, :] * out_stride
        tl.store(out_rows + offs_n[:, None], acc.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@triton.jit(do_not_specialize=["M", "N", "splits", "out_stride"])
def skinny_sum_kernel(
    partial_ptr, bias_ptr, out_ptr,
    M, N, splits, out_stride,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the partial sums [splits, M, N] in the order of K; program (i, m) makes BLOCK columns of row m."""
    m = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask_n = offs_n < N
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        acc += tl.load(partial_ptr + (split * M + m).to(tl.int64) * N + offs_n, mask=mask_n, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + m.to(tl.int64) * out_stride + offs_n, acc.to(out_ptr.dtype.element_ty), mask=mask_n)


@dataclass(frozen=True)
class Launch:
    """How the work is cut: ``programs`` persistent programs, K in ``splits`` ranges of ``steps_per_split`` blocks."""

    programs: int
    splits: int
    steps_per_split: int


def plan(tile: SkinnyTile, N: int, K: int, element_bytes: int) -> Launch:
    """Cut N x K into tasks: programs that saturate the link, of equal work; K is split if W has too few tiles."""
    wanted = runtime.saturating_programs(tile, element_bytes)
    tiles, steps = math.ceil(N / tile.block_n), math.ceil(K / tile.block_k)
    splits = max(1, min(wanted // tiles, steps // MIN_STEPS))
    steps_per_split = max(1, math.ceil(steps / splits))
    splits = max(1, math.ceil(steps / steps_per_split))
    rounds = math.ceil(tiles * splits / wanted)
    return Launch(math.ceil(tiles * splits / rounds), splits, steps_per_split)


def constants(tile: SkinnyTile, *, bias: bool, split: bool, upcast: bool, units: runtime.Units) -> dict[str, Any]:
    """The compile-time constants of `skinny_kernel`."""
    return {
        "HAS_BIAS": bias, "SPLIT": split, "UPCAST": upcast, **units.constants(),
        "BLOCK_N": tile.block_n, "BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k, "STAGES": tile.stages,
    }  # fmt: skip


def specialise(
    tile: SkinnyTile, dtype: torch.dtype, *, aligned: bool = True, bias: bool = False, split: bool = False
) -> Specialisation:
    """What the compiler is told about `skinny_kernel`.

    Args:
        tile: The tile, already scaled to the dtype.
        dtype: Of x, W, bias and the result.
        aligned: Rows of W begin on 16 bytes; otherwise on an element only. Those of x always do (`aligned_rows`).
        bias: A bias is added.
        split: K is split: the result is fp32 partial sums.
    """
    name = runtime.DTYPES[dtype]
    consts = constants(tile, bias=bias, split=split, upcast=False, units=runtime.Units.assumed(dtype, aligned))
    signature = {"w_ptr": f"*{name}", "x_ptr": f"*{name}", "bias_ptr": f"*{name}" if bias else "constexpr"}
    signature |= {"out_ptr": "*fp32" if split else f"*{name}"}
    signature |= dict.fromkeys(_INTEGERS, "i32") | dict.fromkeys(consts, "constexpr")
    divisible = (*(("w_ptr",) if aligned else ()), "x_ptr", *(("bias_ptr",) if bias else ()), "out_ptr")
    consts |= {} if bias else {"bias_ptr": None}
    return Specialisation("skinny_kernel", signature, consts, divisible, tile.warps, tile.stages)


def specialise_sum(dtype: torch.dtype, *, bias: bool = False) -> Specialisation:
    """What the compiler is told about `skinny_sum_kernel`, which writes ``dtype``."""
    name = runtime.DTYPES[dtype]
    signature = {"partial_ptr": "*fp32", "bias_ptr": f"*{name}" if bias else "constexpr", "out_ptr": f"*{name}"}
    consts: dict[str, Any] = {"HAS_BIAS": bias, "BLOCK": SUM_BLOCK}
    signature |= dict.fromkeys(("M", "N", "splits", "out_stride"), "i32") | dict.fromkeys(consts, "constexpr")
    consts |= {} if bias else {"bias_ptr": None}
    pointers = ("partial_ptr", *(("bias_ptr",) if bias else ()), "out_ptr")
    return Specialisation("skinny_sum_kernel", signature, consts, pointers, 4, 1)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    tile: SkinnyTile | None = None,
) -> None:
    """Write x W^T + bias to ``out``.

    Args:
        x: (M, K) on the GPU (on the CPU: in the interpreter); copied if its rows are not 16-byte aligned.
        weight: (N, K), unit stride along K, page-locked host memory, a device view of it, or device memory.
        bias: (N,) beside x, or None.
        out: (M, N), unit stride along N, beside x.
        tile: Other than the default for M.
    """
    (M, K), N, size = x.shape, weight.shape[0], x.element_size()
    tile = tile or pick("skinny", M, size, runtime.arch_of(x.device))
    if M > tile.block_m:
        raise ValueError(f"schedule 'skinny' with block_m={tile.block_m} takes at most that many rows of x, got {M}")
    launch = plan(tile, N, K, size)
    split = launch.splits > 1
    target = runtime.kernel_out(out)
    result = torch.empty((launch.splits * M, N), dtype=torch.float32, device=x.device) if split else target
    x = runtime.aligned_rows(x)
    units = runtime.Units.of(x, weight)
    consts = constants(tile, bias=bias is not None, split=split, upcast=runtime.interpreting(), units=units)
    with runtime.on_device(x.device):
        skinny_kernel[(launch.programs,)](
            weight, x, bias, result, M, N, K // units.k, launch.splits, launch.steps_per_split,
            weight.stride(0) // units.w, x.stride(0) // units.x, result.stride(0),
            **consts, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if split:
            skinny_sum_kernel[(triton.cdiv(N, SUM_BLOCK), M)](
                result, bias, target, M, N, launch.splits, target.stride(0), HAS_BIAS=bias is not None, BLOCK=SUM_BLOCK
            )
    if target is not out:
        out.copy_(target)
