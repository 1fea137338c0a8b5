"""Grouped product: each row of x is multiplied by the weight of its own group, and only groups that have rows are read.

A mixture-of-experts layer is a stack of weights of which a few rows use each one. Rows come sorted by group, so one
program can own a block of weight rows and serve all the rows of its group with them: a group's weight is read once,
whatever the number of its rows, and a group without rows is never touched.

While a group's rows fit one tile the weight streams through registers, as in the skinny kernel. Above that the program
first copies its block into its own slot of a ring in device memory and then serves tile after tile from there, as in
the wide kernel. Which of the two is decided on the device, group by group: the host never learns the routing.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from offload_kernels import runtime
from offload_kernels.tiles import GroupedTile, Specialisation

_INTEGERS = ["N", "k_units", "groups", "w_group_stride", "w_stride", "x_stride", "out_stride", "ring_stride"]


@triton.jit
def copy_block(
    slot_ptr, w_ptr, slot_stride, w_stride, mask_n, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Copy one block of weight rows over the bus into the program's slot of the ring."""
    offs_k = tl.arange(0, BLOCK_K)
    w_offs = tl.arange(0, BLOCK_N)[:, None] * w_stride + offs_k[None, :]
    slot_offs = tl.arange(0, BLOCK_N)[:, None] * slot_stride + offs_k[None, :]
    full = K // BLOCK_K * BLOCK_K
    for k in tl.range(0, full, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_ptr + k + w_offs, mask=mask_n[:, None], other=0.0)  # [BLOCK_N, BLOCK_K]
        tl.store(slot_ptr + k + slot_offs, w, mask=mask_n[:, None])
    if full < K:
        mask = mask_n[:, None] & (full + offs_k < K)[None, :]
        w = tl.load(w_ptr + full + w_offs, mask=mask, other=0.0)  # [BLOCK_N, BLOCK_K]
        tl.store(slot_ptr + full + slot_offs, w, mask=mask)


@triton.jit
def multiply_add(w, x, acc, UPCAST: tl.constexpr):
    """acc + w x. UPCAST serves the interpreter, whose product of bf16 multiplies bit patterns."""
    if UPCAST:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit
def multiply_block(
    w_ptr, up_ptr, x_rows, w_stride, mask_n, mask_m, K,
    GATED: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, BLOCK_M]: a block of rows of W times a tile of rows of x; GATED: silu(gate) * up of two blocks."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_rows[None, :] + offs_k[:, None]
    w_offs = tl.arange(0, BLOCK_N)[:, None] * w_stride + offs_k[None, :]  # 32 bits: pointers take twice the registers
    full = K // BLOCK_K * BLOCK_K
    for k in tl.range(0, full, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_ptrs + k, mask=mask_m[None, :], other=0.0)  # [BLOCK_K, BLOCK_M]
        w = tl.load(w_ptr + k + w_offs, mask=mask_n[:, None], other=0.0)  # [BLOCK_N, BLOCK_K]
        acc = multiply_add(w, x, acc, UPCAST)
        if GATED:
            w_up = tl.load(up_ptr + k + w_offs, mask=mask_n[:, None], other=0.0)  # [BLOCK_N, BLOCK_K]
            acc_up = multiply_add(w_up, x, acc_up, UPCAST)
    if full < K:  # peeled: a mask on K inside the loop would narrow its loads
        mask_k = full + offs_k < K
        x = tl.load(x_ptrs + full, mask=mask_k[:, None] & mask_m[None, :], other=0.0)
        w = tl.load(w_ptr + full + w_offs, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
        acc = multiply_add(w, x, acc, UPCAST)
        if GATED:
            w_up = tl.load(up_ptr + full + w_offs, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
            acc_up = multiply_add(w_up, x, acc_up, UPCAST)
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    return acc


@triton.jit(do_not_specialize=_INTEGERS)
def grouped_kernel(
    w_ptr, x_ptr, out_ptr, ring_ptr,
    pairs_ptr, offsets_ptr, active_ptr,
    N, k_units, groups,
    w_group_stride, w_stride, x_stride, out_stride, ring_stride,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, GATED: tl.constexpr, RING: tl.constexpr, UPCAST: tl.constexpr,
    W_UNIT: tl.constexpr, X_UNIT: tl.constexpr, K_UNIT: tl.constexpr, RING_UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One item is a block of BLOCK_N weight rows of one of the ``groups`` first listed in ``active``, which has those
    with rows first.

    Rows are numbered in sorted order; rows offsets[g] to offsets[g + 1] belong to group g. GATHER = k takes row r of x
    from row pairs[r] // k, SCATTER writes row r of the result to row pairs[r]. GATED: the weight has N gate rows, then
    N up rows.
    """
    K = k_units * K_UNIT
    HALVES: tl.constexpr = 2 if GATED else 1
    pid = tl.program_id(0)
    blocks = tl.cdiv(N, BLOCK_N)
    for item in range(pid, groups * blocks, tl.num_programs(0)):
        group = tl.load(active_ptr + item // blocks)
        first = tl.load(offsets_ptr + group).to(tl.int32)
        last = tl.load(offsets_ptr + group + 1).to(tl.int32)
        first_n = item % blocks * BLOCK_N
        offs_n = first_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        stride = w_stride * W_UNIT
        gate_ptr = w_ptr + group.to(tl.int64) * w_group_stride * W_UNIT + first_n.to(tl.int64) * stride
        up_ptr = gate_ptr + N.to(tl.int64) * stride
        if RING:
            if last - first > BLOCK_M:
                slot_stride = ring_stride * RING_UNIT
                slot_ptr = ring_ptr + pid.to(tl.int64) * HALVES * BLOCK_N * slot_stride
                slot_up_ptr = slot_ptr + BLOCK_N * slot_stride
                tl.debug_barrier()  # nobody reads any more what the previous item left in the slot
                copy_block(slot_ptr, gate_ptr, slot_stride, stride, mask_n, K, BLOCK_N, BLOCK_K, STAGES)
                if GATED:
                    copy_block(slot_up_ptr, up_ptr, slot_stride, stride, mask_n, K, BLOCK_N, BLOCK_K, STAGES)
                tl.debug_barrier()  # other threads of this program read what this one wrote
                gate_ptr, up_ptr, stride = slot_ptr, slot_up_ptr, slot_stride
        for start in range(first, last, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)
            mask_m = offs_m < last
            pair = offs_m.to(tl.int64)
            if GATHER > 0 or SCATTER:
                pair = tl.load(pairs_ptr + offs_m, mask=mask_m, other=0)  # [BLOCK_M]
            x_row = pair // GATHER if GATHER > 0 else offs_m.to(tl.int64)
            out_row = pair if SCATTER else offs_m.to(tl.int64)
            acc = multiply_block(
                gate_ptr, up_ptr, x_ptr + x_row * x_stride * X_UNIT, stride, mask_n, mask_m, K,
                GATED, UPCAST, BLOCK_N, BLOCK_M, BLOCK_K, STAGES,
            )  # fmt: skip
            out = out_ptr + (out_row * out_stride)[None, :] + offs_n[:, None]
            tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@dataclass(frozen=True)
class Groups:
    """Which rows belong to which group, on the device: the host never reads it.

    Args:
        offsets: (E + 1,) int64; sorted rows offsets[g] to offsets[g + 1] belong to group g.
        active: (E,) int64; the groups, those with rows first.
        pairs: (P,) int64; where a sorted row comes from, if rows are gathered or scattered.
        most: Groups that can have rows at most.
        ring: Whether a group may have more rows than a tile, and then goes through the ring.
    """

    offsets: torch.Tensor
    active: torch.Tensor
    pairs: torch.Tensor | None
    most: int
    ring: bool

    @classmethod
    def of(cls, offsets: torch.Tensor, rows: int, *, ring: bool, pairs: torch.Tensor | None = None) -> "Groups":
        """From the offsets of ``rows`` sorted rows."""
        idle = (offsets[1:] <= offsets[:-1]).to(torch.uint8)
        active = torch.sort(idle, stable=True).indices
        return cls(offsets, active, pairs, min(rows, offsets.numel() - 1), ring)


def programs_of(tile: GroupedTile, blocks: int, halves: int, element_bytes: int, ring: bool, processors: int) -> int:
    """How many persistent programs share ``blocks`` blocks of weight rows.

    Without a ring as many as saturate the link, with equal rounds. Through the ring products take their time too: up to
    one program a processor, two blocks or more for each, so that the ring is at most half of the weights.
    """
    if ring:
        return max(1, min(processors, blocks // 2))
    wanted = math.ceil(runtime.saturating_programs(tile, element_bytes) / halves)
    return max(1, math.ceil(blocks / math.ceil(blocks / wanted)))


def units_of(x: torch.Tensor, weight: torch.Tensor) -> runtime.Units:
    """As `runtime.Units.of`, for a stack of weights (E, N, K): the stride between weights counts too."""
    units = runtime.Units.of(x, weight)
    return replace(units, w=math.gcd(units.w, weight.stride(0)))


def constants(
    tile: GroupedTile, *, gather: int, scatter: bool, gated: bool, ring: bool, upcast: bool, units: runtime.Units
) -> dict[str, Any]:
    """The compile-time constants of `grouped_kernel`."""
    return {
        "GATHER": gather, "SCATTER": scatter, "GATED": gated, "RING": ring, "UPCAST": upcast,
        **units.constants(), "RING_UNIT": units.vector,
        "BLOCK_N": tile.block_n, "BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k, "STAGES": tile.stages,
    }  # fmt: skip


def specialise(
    tile: GroupedTile, dtype: torch.dtype, *,
    gather: int = 0, scatter: bool = False, gated: bool = False, ring: bool = False, aligned: bool = True,
) -> Specialisation:  # fmt: skip
    """What the compiler is told about `grouped_kernel`; ``dtype`` and ``aligned`` as in `skinny.specialise`.

    Args:
        gather: Experts per token if rows of x are taken by token; 0 takes them in sorted order.
        scatter: Rows of the result go to their pair's place.
        gated: The weight has gate rows, then up rows.
        ring: Groups with more rows than ``tile.block_m`` go through the ring.
    """
    units = runtime.Units.assumed(dtype, aligned)
    consts = constants(tile, gather=gather, scatter=scatter, gated=gated, ring=ring, upcast=False, units=units)
    indexed, data = gather > 0 or scatter, f"*{runtime.DTYPES[dtype]}"
    pointers = {"w_ptr": data, "x_ptr": data, "out_ptr": data} | ({"ring_ptr": data} if ring else {})
    pointers |= ({"pairs_ptr": "*i64"} if indexed else {}) | {"offsets_ptr": "*i64", "active_ptr": "*i64"}
    absent = {name: None for name in ("ring_ptr", "pairs_ptr") if name not in pointers}
    kinds = pointers | dict.fromkeys(_INTEGERS, "i32") | dict.fromkeys(consts | absent, "constexpr")
    signature = {name: kinds[name] for name in grouped_kernel.arg_names}
    divisible = tuple(name for name in pointers if aligned or name != "w_ptr")
    return Specialisation("grouped_kernel", signature, consts | absent, divisible, tile.warps, tile.stages)


def run(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: Groups, tile: GroupedTile, *,
    gather: int = 0, scatter: bool = False, gated: bool = False,
) -> None:  # fmt: skip
    """Write each row of x times the weight of its group to ``out``.

    Args:
        x: (R, K) on the GPU (on the CPU: in the interpreter); copied if its rows are not 16-byte aligned.
        weight: (E, N, K), or (E, 2 N, K) if gated; unit stride along K; page-locked host memory, a view of it, or
            device memory.
        out: (P, N), unit stride along N, beside x; rows of no group are left as they are.
        groups: The rows of each group.
        tile: Block sizes.
        gather, scatter, gated: As in `specialise`.
    """
    N, K, size = out.shape[1], x.shape[1], x.element_size()
    halves = 2 if gated else 1
    blocks = groups.most * math.ceil(N / tile.block_n)
    programs = programs_of(tile, blocks, halves, size, groups.ring, runtime.processors_of(x.device))
    line = runtime.line_elements(size)
    ring_shape = (programs * halves * tile.block_n, math.ceil(K / line) * line)
    ring = torch.empty(ring_shape, dtype=x.dtype, device=x.device) if groups.ring else None
    target = runtime.kernel_out(out)
    if target is not out:
        target.copy_(out)
    x = runtime.aligned_rows(x)
    units = units_of(x, weight)
    consts = constants(
        tile, gather=gather, scatter=scatter, gated=gated, ring=groups.ring, upcast=runtime.interpreting(), units=units
    )
    with runtime.on_device(x.device):
        grouped_kernel[(programs,)](
            weight, x, target, ring, groups.pairs, groups.offsets, groups.active,
            N, K // units.k, groups.most,
            weight.stride(0) // units.w, weight.stride(1) // units.w, x.stride(0) // units.x, target.stride(0),
            ring_shape[1] // units.vector,
            **consts, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if target is not out:
        out.copy_(target)
