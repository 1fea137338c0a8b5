"""Mixture of experts whose weights may live on the host: only the routed experts are read, each of their bytes once.

Eight of 128 experts at one token are a sixteenth of the bytes: what beats the bus is to leave bytes where they are. The
routing stays on the device, so a decode step neither waits for it nor changes its launches, and a captured graph can
replay it.
"""

import torch

from offload_kernels import expert_ops  # noqa: F401  (defines the operators)
from offload_kernels.checks import refuse_grad
from offload_kernels.expert_checks import refuse_ids


def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    schedule: str | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of weight * w2[e] (silu(gate) * up), where gate and up are the halves of w13[e] x.

    Args:
        x: (T, H) fp32, fp16 or bf16 on the device.
        w13: (E, 2 I, H) in x's dtype; rows 0 to I - 1 are gate, I to 2 I - 1 up. In page-locked host memory (pinned CPU
            tensor or device view) or on the device; unit stride along H.
        w2: (E, H, I), as w13; unit stride along I.
        topk_ids: (T, k) int32 or int64 beside x. On CPU tensors ids are checked; on CUDA, where that would stop the
            host, a pair with an id outside 0..E-1 contributes zero (`check_routing` looks for them).
        topk_weights: (T, k) fp32 or x's dtype beside x; used as they are, not renormalised.
        schedule: ``grouped`` runs the Triton kernels (on CPU tensors in the interpreter); None chooses them on CUDA and
            torch on the CPU.

    Returns:
        (T, H) in x's dtype, the same bits on every run.

    Raises:
        ValueError: Shapes, dtypes, devices or ids that do not go together, a pageable host weight, or an input that
            requires grad.
        RuntimeError: ``grouped`` on CPU tensors outside the interpreter.

    A token's ids are expected to be distinct, as top-k gives them: then every expert's bytes cross the bus once for any
    T. Device scratch is (T k) x (I + H) elements for the pairs and, with more tokens than the largest tile holds (32 or
    64), a ring of at most one block of rows per processor.
    """
    refuse_grad(x, w13, w2, topk_weights)
    return torch.ops.offload.fused_experts(x, w13, w2, topk_ids, topk_weights, schedule)


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, *, schedule: str | None = None
) -> torch.Tensor:
    """Multiply each row of x with the weight of its group; rows come sorted by group.

    Args:
        x: (P, K) fp32, fp16 or bf16 on the device.
        weight: (E, N, K) in x's dtype, in page-locked host memory or on the device; unit stride along K.
        offsets: (E + 1,) int64 beside x, not decreasing; rows offsets[e] to offsets[e + 1] belong to group e. Checked
            on CPU tensors; on CUDA, where that would stop the host, what is beyond the rows of x is left out.
        schedule: As in `fused_experts`.

    Returns:
        (P, N) in x's dtype; rows of no group are zero.

    Raises:
        ValueError: Shapes, dtypes, devices or offsets that do not go together, a pageable host weight, or an input
            that requires grad.
        RuntimeError: ``grouped`` on CPU tensors outside the interpreter.
    """
    refuse_grad(x, weight)
    return torch.ops.offload.grouped_linear(x, weight, offsets, schedule)


def check_routing(topk_ids: torch.Tensor, experts: int) -> None:
    """Refuse ids outside 0..experts-1. On CUDA this waits for the device: for debugging, not for a decode step.

    Args:
        topk_ids: Any shape, int32 or int64, any device.
        experts: Number of experts.

    Raises:
        ValueError: Some ids are out of range.
    """
    refuse_ids(topk_ids, experts)
