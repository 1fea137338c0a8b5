"""The last step of a mixture of experts: each token's weighted sum over its experts, in a fixed order.

Adding with atomics as the experts finish would give other bits on every run.
"""

import torch
import triton
import triton.language as tl

from offload_kernels import runtime
from offload_kernels.tiles import Specialisation

BLOCK = 512  # columns of one program


@triton.jit(do_not_specialize=["H", "experts"])
def combine_kernel(
    pair_out_ptr, ids_ptr, topk_weights_ptr, out_ptr,
    H, experts,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the TOP_K weighted rows of each token in the order of its experts; a pair with no valid expert is skipped."""
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_h = offs_h < H
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(ids_ptr + pair)
        if (expert >= 0) & (expert < experts):
            row = tl.load(pair_out_ptr + pair * H + offs_h, mask=mask_h, other=0.0)  # [BLOCK]
            acc += tl.load(topk_weights_ptr + pair).to(tl.float32) * row.to(tl.float32)
    tl.store(out_ptr + token * H + offs_h, acc.to(out_ptr.dtype.element_ty), mask=mask_h)


def specialise(dtype: torch.dtype, ids: str, topk_weights: str, top_k: int) -> Specialisation:
    """What the compiler is told about `combine_kernel`.

    Args:
        dtype: Of the pairs' rows and of the result.
        ids: ``i32`` or ``i64``.
        topk_weights: ``fp32`` or the name of ``dtype``.
        top_k: Experts per token.
    """
    data = f"*{runtime.DTYPES[dtype]}"
    pointers = {"pair_out_ptr": data, "ids_ptr": f"*{ids}", "topk_weights_ptr": f"*{topk_weights}", "out_ptr": data}
    signature = pointers | {"H": "i32", "experts": "i32", "TOP_K": "constexpr", "BLOCK": "constexpr"}
    return Specialisation("combine_kernel", signature, {"TOP_K": top_k, "BLOCK": BLOCK}, tuple(pointers), 4, 1)


def run(
    pair_out: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor, experts: int
) -> None:
    """Write each token's weighted sum over its experts to ``out``.

    Args:
        pair_out: (T k, H) contiguous; rows of pairs whose id is out of range are not read.
        topk_ids: (T, k) int32 or int64, contiguous.
        topk_weights: (T, k), contiguous.
        out: (T, H) contiguous.
        experts: Ids run from 0 to here, exclusive.
    """
    (T, top_k), H = topk_ids.shape, out.shape[1]
    target = runtime.kernel_out(out)
    with runtime.on_device(out.device):
        combine_kernel[(T, triton.cdiv(H, BLOCK))](
            pair_out, topk_ids, topk_weights, target, H, experts, TOP_K=top_k, BLOCK=BLOCK
        )
    if target is not out:
        out.copy_(target)
