"""The torch operators: what a dispatch mode, ``torch.compile`` and ``torch.export`` see of `linear`.

``Library.define`` and ``impl`` rather than ``custom_op``, which takes about twice as long for each call.
"""

import math

import torch
import torch.nn.functional as F

from offload_kernels import runtime
from offload_kernels.checks import as_rows, check_linear, check_locked, check_out, refuse_grad
from offload_kernels.schedule import SCHEDULES, GivenRates, choose_schedule

LIBRARY = torch.library.Library("offload", "DEF")

_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? bias=None, str? schedule=None, "
    "float? sm_bytes_per_s=None, float? ce_bytes_per_s=None"
)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    schedule: str | None = None,
    sm_bytes_per_s: float | None = None,
    ce_bytes_per_s: float | None = None,
) -> torch.Tensor:
    """``offload::linear`` on the CPU and on CUDA."""
    _check(x, weight, bias, schedule)
    if schedule is None and x.is_cpu:
        return F.linear(x, weight, bias)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    _write(x, weight, bias, schedule, sm_bytes_per_s, ce_bytes_per_s, out)
    return out


def _linear_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    schedule: str | None = None,
    sm_bytes_per_s: float | None = None,
    ce_bytes_per_s: float | None = None,
    *,
    out: torch.Tensor,
) -> None:
    """``offload::linear_out`` on the CPU and on CUDA."""
    _check(x, weight, bias, schedule)
    check_out(out, x, weight)
    if schedule is None and x.is_cpu:
        out.copy_(F.linear(x, weight, bias))
    else:
        _write(x, weight, bias, schedule, sm_bytes_per_s, ce_bytes_per_s, out)


def _linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    schedule: str | None = None,
    sm_bytes_per_s: float | None = None,
    ce_bytes_per_s: float | None = None,
) -> torch.Tensor:
    """Shape and dtype of ``offload::linear``; where the bytes are is not asked, a fake tensor has none."""
    _check(x, weight, bias, schedule)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _linear_out_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    schedule: str | None = None,
    sm_bytes_per_s: float | None = None,
    ce_bytes_per_s: float | None = None,
    *,
    out: torch.Tensor,
) -> None:
    """Checks of ``offload::linear_out``."""
    _check(x, weight, bias, schedule)
    check_out(out, x, weight)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, schedule: str | None) -> None:
    refuse_grad(x, weight, bias)
    check_linear(x, weight, bias)
    if schedule is not None and schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is unknown: use one of {', '.join(SCHEDULES)}, or None")


def _write(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    schedule: str | None,
    sm_bytes_per_s: float | None,
    ce_bytes_per_s: float | None,
    out: torch.Tensor,
) -> None:
    """Run a schedule on the rows of x; the modules with kernels are imported here, triton with them."""
    (N, K), M = weight.shape, math.prod(x.shape[:-1])
    if schedule is None:
        schedule = choose_schedule(M, N, K, weight.dtype, GivenRates.of(sm_bytes_per_s, ce_bytes_per_s))
    runtime.demand_runnable(schedule, x.device)
    if x.is_cuda:
        check_locked(weight)
    target = as_rows(out, "out")
    if M == 0 or N == 0:
        return
    rows, bias = x.reshape(M, K), None if bias is None else bias.contiguous()
    if schedule == "staged":
        from offload_kernels import staged

        staged.run(rows, weight, bias, target)
    elif schedule == "wide":
        from offload_kernels import wide

        wide.run(rows, weight, bias, target)
    else:
        from offload_kernels import skinny

        skinny.run(rows, weight, bias, target)


LIBRARY.define(f"linear({_ARGUMENTS}) -> Tensor")
LIBRARY.define(f"linear_out({_ARGUMENTS}, *, Tensor(a!) out) -> ()")
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("linear", _linear, _device)
    LIBRARY.impl("linear_out", _linear_out, _device)
torch.library.register_fake("offload::linear", _linear_fake, lib=LIBRARY)
torch.library.register_fake("offload::linear_out", _linear_out_fake, lib=LIBRARY)
