"""`linear`: a linear layer whose weight may be in host memory, and what it demands of its arguments."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from offload_kernels import ops  # noqa: F401  (defines the operators)
from offload_kernels.checks import DTYPES, check_linear, refuse_grad
from offload_kernels.schedule import Rates
from offload_kernels.tiles import LINE_BYTES


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    schedule: str | None = None,
    rates: Rates | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x W^T + bias, reading every byte of a host weight once over the bus.

    Accumulates in fp32; the same bits on every run; can be captured in a CUDA graph. On CPU tensors ``schedule=None``
    is torch's own product and a named schedule runs that kernel in Triton's interpreter (``staged``: with plain
    copies). A ``TorchDispatchMode`` and ``torch.compile`` see one operator, ``offload::linear``
    (``offload::linear_out`` with ``out``).

    Args:
        x: (..., K) activations on the device; fp32, fp16 or bf16. Copied if rows are not 16-byte aligned.
        weight: (N, K) of x's dtype, unit stride along K, any row stride: a pinned CPU tensor, a device view of
            page-locked memory, or a tensor beside x. See `check_weight` for what makes it slow.
        bias: (N,) beside x and of its dtype, or None; copied if it is not contiguous.
        schedule: ``skinny`` (at most 256 rows of x), ``wide``, ``staged``, or None for `choose_schedule`.
        rates: Measured rates of the link for `choose_schedule`; None decides from shapes and constants.
        out: (..., N) to write to, beside x and of its dtype, not x itself; rows contiguous, with a common stride.

    Returns:
        (..., N) beside x, of its dtype; ``out`` if given.

    Raises:
        ValueError: Arguments that do not go together, a pageable host weight on CUDA, an unknown schedule, more rows
            than ``skinny`` takes, or a tensor that requires grad while grad mode is on.
        RuntimeError: A Triton schedule on the CPU outside of the interpreter.
    """
    refuse_grad(x, weight, bias, out)
    if schedule is None and out is None and x.is_cpu and not observed():
        check_linear(x, weight, bias)
        return F.linear(x, weight, bias)
    sm, ce = (None, None) if rates is None else (rates.sm_bytes_per_s, rates.ce_bytes_per_s)
    if out is None:
        return torch.ops.offload.linear(x, weight, bias, schedule, sm, ce)
    torch.ops.offload.linear_out(x, weight, bias, schedule, sm, ce, out=out)
    return out


def observed() -> bool:
    """Whether somebody watches operators. When nobody does, `linear` spares the operator: for 64 x 64 on one CPU core
    that is 4.3 us a call instead of 6.4, beside 2.2 for ``F.linear`` alone.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


@dataclass(frozen=True)
class WeightCheck:
    """How the kernels can read a weight.

    Args:
        load_bytes: Bytes of one load of one thread; 16 is full speed.
        full_lines: Each row begins on a line of 128 bytes, so no request on the bus is a fraction of one.
        remedy: What to do about a slow layout; None if there is nothing to do.
    """

    load_bytes: int
    full_lines: bool
    remedy: str | None


def check_weight(weight: torch.Tensor) -> WeightCheck:
    """Tell how fast the kernels can read a weight as it is laid out: unaligned rows work, slower.

    Args:
        weight: (N, K) or (E, N, K), unit stride along K.

    Raises:
        ValueError: The kernels do not take this weight at all.
    """
    size = weight.element_size()
    if weight.dim() not in (2, 3) or weight.dtype not in DTYPES or (weight.stride(-1) != 1 and weight.shape[-1] > 1):
        raise ValueError(
            f"weight {tuple(weight.shape)} {weight.dtype} with strides {weight.stride()}: the kernels take (N, K) or "
            "(E, N, K) of fp32, fp16 or bf16 with unit stride along K: weight.contiguous()"
        )
    strides_bytes = [stride * size for stride, n in zip(weight.stride()[:-1], weight.shape, strict=False) if n > 1]
    starts = [weight.data_ptr(), *strides_bytes]
    load_bytes = next(n for n in (16, 8, 4, 2) if all(start % n == 0 for start in starts))
    full_lines = all(start % LINE_BYTES == 0 for start in starts)
    remedy = None
    if not full_lines:
        K = weight.shape[-1]
        columns = -(-K * size // LINE_BYTES) * LINE_BYTES // size
        remedy = f"begin each row on {LINE_BYTES} bytes: allocate rows of {columns} elements and use [..., :{K}]"
    return WeightCheck(load_bytes, full_lines, remedy)
