"""The torch operators of the experts: what a dispatch mode, `torch.compile` and a captured graph see as one call.

Everything here may be traced or run on fake tensors, except the implementations, which also ask where a weight is.
"""

import torch
import torch.nn.functional as F

from offload_kernels import runtime
from offload_kernels.checks import check_locked, refuse_grad
from offload_kernels.expert_checks import check_experts, check_grouped, refuse_ids, refuse_offsets
from offload_kernels.ops import LIBRARY


def sorted_pairs(topk_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs (T k,) sorted by expert, in token order within one, and offsets (E + 1,): fixed shapes and no wait for the
    device.

    Pairs with an id outside 0..E-1 come last and belong to no expert.
    """
    ids = topk_ids.reshape(-1)
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    by_expert, pairs = torch.sort(ids, stable=True)
    return pairs, torch.searchsorted(by_expert, torch.arange(experts + 1, dtype=ids.dtype, device=ids.device))


def experts_by_kernel(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """Gate-up for all pairs, down for all pairs, then each token's sum: three launches around the sort."""
    from offload_kernels import combine, grouped
    from offload_kernels.tiles import pick

    (T, H), (experts, double, _), top_k = x.shape, w13.shape, topk_ids.shape[1]
    if 0 in (T, top_k, experts, double, H):
        return x.new_zeros((T, H))
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    pairs, offsets = sorted_pairs(topk_ids, experts)
    size, arch = x.element_size(), runtime.arch_of(x.device)
    gate_up, down = pick("gate_up", T, size, arch), pick("down", T, size, arch)
    # An expert has at most T rows as long as a token's ids are distinct.
    groups = [grouped.Groups.of(offsets, T * top_k, ring=T > tile.block_m, pairs=pairs) for tile in (gate_up, down)]
    inner, line = double // 2, runtime.line_elements(size)
    hidden = x.new_empty((T * top_k, -(-inner // line) * line))[:, :inner]
    grouped.run(x, w13, hidden, groups[0], gate_up, gather=top_k, gated=True)
    pair_out = x.new_empty((T * top_k, H))
    grouped.run(hidden, w2, pair_out, groups[1], down, scatter=True)
    out = x.new_empty((T, H))
    combine.run(pair_out, topk_ids, topk_weights, out, experts)
    return out


def experts_by_torch(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """The same on the CPU: one active expert after the other, sums in fp32 in the order of the experts."""
    top_k = topk_ids.shape[1]
    pairs, offsets = sorted_pairs(topk_ids, w13.shape[0])
    ends = offsets.tolist()
    scale = topk_weights.reshape(-1, 1)[pairs].float()
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for expert, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
        if first < last:
            tokens = pairs[first:last] // top_k
            gate, up = F.linear(x[tokens], w13[expert]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * up, w2[expert])
            out.index_add_(0, tokens, part.float() * scale[first:last])
    return out.to(x.dtype)


def grouped_by_kernel(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """One launch; offsets beyond the rows of x, which only the CPU can refuse without waiting, end there."""
    from offload_kernels import grouped
    from offload_kernels.tiles import pick

    out = x.new_zeros((x.shape[0], weight.shape[1]))
    if out.numel() == 0 or weight.numel() == 0:
        return out
    tile = pick("down", x.shape[0], x.element_size(), runtime.arch_of(x.device))
    groups = grouped.Groups.of(offsets.clamp(0, x.shape[0]), x.shape[0], ring=x.shape[0] > tile.block_m)
    grouped.run(x, weight, out, groups, tile)
    return out


def _grouped_by_torch(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros((x.shape[0], weight.shape[1]))
    ends = offsets.tolist()
    for group, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
        if first < last:
            torch.mm(x[first:last], weight[group].t(), out=out[first:last])
    return out


def _fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    schedule: str | None = None,
) -> torch.Tensor:
    """``offload::fused_experts`` on the CPU and on CUDA."""
    refuse_grad(x, w13, w2, topk_weights)
    check_experts(x, w13, w2, topk_ids, topk_weights, schedule)
    if x.is_cpu:
        refuse_ids(topk_ids, w13.shape[0])
        if schedule is None:
            return experts_by_torch(x, w13, w2, topk_ids, topk_weights)
    runtime.demand_runnable("grouped", x.device)
    if x.is_cuda:
        check_locked(w13)
        check_locked(w2)
    return experts_by_kernel(x, w13, w2, topk_ids, topk_weights)


def _fused_experts_fake(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    schedule: str | None = None,
) -> torch.Tensor:
    """Shape and dtype of ``offload::fused_experts``; fake ids cannot be read."""
    check_experts(x, w13, w2, topk_ids, topk_weights, schedule)
    return x.new_empty(x.shape)


def _grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, schedule: str | None = None
) -> torch.Tensor:
    """``offload::grouped_linear`` on the CPU and on CUDA."""
    refuse_grad(x, weight)
    check_grouped(x, weight, offsets, schedule)
    if x.is_cpu:
        refuse_offsets(offsets, x.shape[0])
        if schedule is None:
            return _grouped_by_torch(x, weight, offsets)
    runtime.demand_runnable("grouped", x.device)
    if x.is_cuda:
        check_locked(weight)
    return grouped_by_kernel(x, weight, offsets)


def _grouped_linear_fake(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, schedule: str | None = None
) -> torch.Tensor:
    """Shape and dtype of ``offload::grouped_linear``."""
    check_grouped(x, weight, offsets, schedule)
    return x.new_empty((x.shape[0], weight.shape[1]))


LIBRARY.define(
    "fused_experts(Tensor x, Tensor w13, Tensor w2, Tensor topk_ids, Tensor topk_weights, str? schedule=None) -> Tensor"
)
LIBRARY.define("grouped_linear(Tensor x, Tensor weight, Tensor offsets, str? schedule=None) -> Tensor")
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("fused_experts", _fused_experts, _device)
    LIBRARY.impl("grouped_linear", _grouped_linear, _device)
torch.library.register_fake("offload::fused_experts", _fused_experts_fake, lib=LIBRARY)
torch.library.register_fake("offload::grouped_linear", _grouped_linear_fake, lib=LIBRARY)
