"""What the experts demand of their arguments, told before a launch from shapes, dtypes and devices alone."""

import torch

from offload_kernels.checks import DTYPES, MOST_STRIDE

EXPERT_SCHEDULES = ("grouped",)


def check_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    schedule: str | None,
) -> None:
    """Refuse what no kernel should meet, from shapes, dtypes and devices alone."""
    _check_schedule(schedule)
    if x.dim() != 2 or w13.dim() != 3 or w2.dim() != 3:
        raise ValueError(f"x is (T, H), w13 (E, 2 I, H), w2 (E, H, I); got {_shapes(x=x, w13=w13, w2=w2)}")
    experts, double, H = w13.shape
    if double % 2 or x.shape[1] != H or w2.shape != (experts, H, double // 2):
        raise ValueError(f"x is (T, H), w13 (E, 2 I, H), w2 (E, H, I); got {_shapes(x=x, w13=w13, w2=w2)}")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_ids and topk_weights are (T, k); got {_shapes(x=x, topk_ids=topk_ids, topk_weights=topk_weights)}"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64) or topk_weights.dtype not in (torch.float32, x.dtype):
        raise ValueError(
            f"topk_ids are int32 or int64, topk_weights float32 or {x.dtype}; "
            f"got {topk_ids.dtype} and {topk_weights.dtype}: convert them"
        )
    _check_weights(x, w13=w13, w2=w2)
    _check_beside(x, topk_ids=topk_ids, topk_weights=topk_weights)


def check_grouped(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, schedule: str | None) -> None:
    """As `check_experts`, for `grouped_linear`."""
    _check_schedule(schedule)
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or offsets.shape != (weight.shape[0] + 1,):
        raise ValueError(
            f"x is (P, K), weight (E, N, K), offsets (E + 1,); got {_shapes(x=x, weight=weight, offsets=offsets)}"
        )
    if offsets.dtype != torch.int64:
        raise ValueError(f"offsets are int64, got {offsets.dtype}")
    _check_weights(x, weight=weight)
    _check_beside(x, offsets=offsets)


def refuse_ids(topk_ids: torch.Tensor, experts: int) -> None:
    """Refuse ids outside 0..experts-1; reads them, so on CUDA it waits for the device."""
    wrong = topk_ids[(topk_ids < 0) | (topk_ids >= experts)]
    if wrong.numel():
        some = sorted(set(wrong.tolist()))[:4]
        raise ValueError(
            f"{wrong.numel()} of {topk_ids.numel()} expert ids are outside 0..{experts - 1}, such as {some}: "
            "mend the routing"
        )


def refuse_offsets(offsets: torch.Tensor, rows: int) -> None:
    """Refuse offsets that leave the rows of x or decrease; reads them."""
    ends = offsets.tolist()
    if ends[0] < 0 or ends[-1] > rows or ends != sorted(ends):
        shown = ends if len(ends) <= 8 else [*ends[:4], "...", *ends[-4:]]
        raise ValueError(f"offsets {shown} do not rise from 0 or more to at most {rows}, the rows of x: sort the rows")


def _check_schedule(schedule: str | None) -> None:
    if schedule is not None and schedule not in EXPERT_SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is unknown: use {', '.join(EXPERT_SCHEDULES)}, or None")


def _check_weights(x: torch.Tensor, **weights: torch.Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}: the kernels take float32, float16 and bfloat16; convert x and the weights")
    for name, weight in weights.items():
        if weight.dtype != x.dtype:
            raise ValueError(f"{name} is {weight.dtype} but x {x.dtype}: convert one of them")
        if weight.stride(-1) != 1 and weight.shape[-1] > 1:
            raise ValueError(f"{name} has strides {weight.stride()}: its last dimension must be contiguous")
        if weight.stride(1) > MOST_STRIDE and weight.shape[1] > 1:
            raise ValueError(
                f"{name} {tuple(weight.shape)} has rows that begin {weight.stride(1)} elements apart, "
                f"the kernels reach {MOST_STRIDE}: {name}.contiguous()"
            )
        if weight.device != x.device and not (weight.is_cpu and x.is_cuda):
            raise ValueError(
                f"x is on {x.device} and {name} on {weight.device}: move it beside x or into page-locked host memory"
            )


def _check_beside(x: torch.Tensor, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but x on {x.device}: move one of them")


def _shapes(**tensors: torch.Tensor) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
