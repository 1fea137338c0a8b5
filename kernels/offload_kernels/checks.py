"""What the kernels demand of their arguments: every mistake is told with its values and the remedy, before a launch."""

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_STRIDE = (1 << 24) - 1  # elements between rows of a weight: kernels count those of a tile in 32 bits


def refuse_grad(*tensors: torch.Tensor | None) -> None:
    """Refuse inputs that require grad while grad mode is on: the kernels have no backward."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                raise ValueError(
                    f"a tensor {tuple(tensor.shape)} requires grad, and the kernels have no backward: "
                    "call under torch.inference_mode(), or detach it"
                )


def check_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Refuse shapes, dtypes, strides and devices that do not go together; cheap, since engines call it per layer."""
    dtype, device, shape = x.dtype, x.device, weight.shape
    if (
        len(shape) != 2
        or x.dim() == 0
        or x.shape[-1] != shape[1]
        or weight.dtype is not dtype
        or dtype not in DTYPES
        or (weight.stride(1) != 1 and shape[1] > 1)
        or (weight.stride(0) > MOST_STRIDE and shape[0] > 1)
        or (weight.device != device and not (weight.is_cpu and x.is_cuda))
        or (bias is not None and (bias.dtype is not dtype or bias.shape != shape[:1] or bias.device != device))
    ):
        raise ValueError(_linear_fault(x, weight, bias))


def check_out(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Refuse an ``out`` that is not what the product would be."""
    refuse_grad(out)
    shape = (*x.shape[:-1], weight.shape[0])
    if tuple(out.shape) != shape or out.dtype is not x.dtype or out.device != x.device:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, the product {shape} {x.dtype} on {x.device}: "
            "allocate it as x.new_empty of that shape"
        )
    if any(stride == 0 and n > 1 for n, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(
            f"out {shape} with strides {out.stride()} has rows that overlap: allocate it as x.new_empty of its shape"
        )


def check_locked(weight: torch.Tensor) -> None:
    """Refuse pageable host memory: the GPU cannot read it."""
    if weight.is_cpu and weight.numel() and not weight.is_pinned():
        raise ValueError(
            f"weight {tuple(weight.shape)} {weight.dtype} is in pageable host memory, which the GPU cannot read: "
            "page_lock(weight), or weight.pin_memory()"
        )


def as_rows(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """See (..., columns) as (rows, columns) with unit stride along the columns; it must be possible without a copy."""
    columns = tensor.shape[-1]
    try:
        rows = tensor.view(tensor.numel() // columns if columns else 0, columns)
    except RuntimeError:
        rows = None
    if rows is None or (columns > 1 and rows.stride(1) != 1):
        raise ValueError(
            f"{what} {tuple(tensor.shape)} with strides {tensor.stride()} is no matrix with contiguous rows: "
            "pass a contiguous one"
        )
    return rows


def _linear_fault(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str:
    """The first thing that is wrong, in words."""
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}: the kernels take float32, float16 and bfloat16; convert x and the weight"
    if weight.dtype is not x.dtype:
        return f"x is {x.dtype} and weight {weight.dtype}: convert one of them, the kernels do not"
    if weight.dim() != 2:
        return f"weight has the shape {tuple(weight.shape)}: pass (N, K), as torch.nn.Linear keeps it"
    if x.shape[-1:] != weight.shape[1:]:
        return (
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} (N, K): the last sizes must be equal, transpose one"
        )
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        return f"weight {tuple(weight.shape)} has strides {weight.stride()}: K needs unit stride, weight.contiguous()"
    if weight.stride(0) > MOST_STRIDE and weight.shape[0] > 1:
        return (
            f"weight {tuple(weight.shape)} has rows that begin {weight.stride(0)} elements apart, "
            f"the kernels reach {MOST_STRIDE}: weight.contiguous()"
        )
    if weight.device != x.device and not (weight.is_cpu and x.is_cuda):
        return f"x is on {x.device} and weight on {weight.device}: move it beside x or into page-locked host memory"
    assert bias is not None
    return (
        f"bias is {tuple(bias.shape)} {bias.dtype} on {bias.device}: "
        f"({weight.shape[0]},) {x.dtype} on {x.device} is needed"
    )
