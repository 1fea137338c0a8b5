"""What our own kernels cost: every byte of a host weight crosses the bus once, by the way that the schedule takes.

`skinny` multiplies what it loads. `wide` and, through the copy engine, `staged` put it into device memory first and
read it from there. Experts read the weights of those that are routed to, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from offload.virtual.operators import flatten, unique_bytes
from offload.virtual.work import Work, is_single, moved
from offload_kernels.schedule import GivenRates, choose_schedule

RING_TOKENS = 64
"""Above this many tokens the experts' weights pass through a ring in device memory."""


def linear(args: Sequence[Any], kwargs: dict[str, Any], made: list[Tensor]) -> Work:
    """`offload::linear(x, weight, bias, schedule, sm, ce)`, and the same with `out`."""
    x, weight, bias, schedule, sm, ce = (*args, *(None,) * (6 - len(args)))
    rows = x.numel() // max(x.shape[-1], 1)
    if schedule is None:
        schedule = choose_schedule(rows, weight.shape[0], weight.shape[1], weight.dtype, GivenRates.of(sm, ce))
    return Work(
        reads=moved(flatten([x, weight, bias])),
        writes=moved([*made, *flatten([kwargs.get("out")])]),
        flops=2 * x.numel() * weight.shape[0],
        single=is_single(weight),
        host_link="ce" if schedule == "staged" else "sm",
        host_staged=schedule != "skinny",
    )


def fused_experts(args: Sequence[Any], kwargs: dict[str, Any], made: list[Tensor]) -> Work:
    """`offload::fused_experts(x, w13, w2, topk_ids, topk_weights, schedule)`."""
    x, w13, w2, ids, weights = args[:5]
    experts, hidden, inner = w2.shape
    pairs = ids.numel()
    active = routed_experts(ids, experts)
    # Each pair's gated product and its result are written to scratch and read back.
    scratch = 2 * pairs * (inner + hidden) * x.itemsize
    tables = [(table, unique_bytes(table) * active // experts) for table in (w13, w2)]
    return Work(
        reads=[*moved([x, ids, weights]), *tables],
        writes=[(tensor, unique_bytes(tensor) + scratch) for tensor in made],
        flops=2 * pairs * 3 * inner * hidden,
        single=is_single(x),
        host_staged=x.shape[0] > RING_TOKENS,
    )


def grouped_linear(args: Sequence[Any], kwargs: dict[str, Any], made: list[Tensor]) -> Work:
    """`offload::grouped_linear(x, weight, offsets, schedule)`: every group is taken to have rows."""
    x, weight, offsets = args[:3]
    experts, rows, columns = weight.shape
    active = min(experts, x.shape[0])
    if offsets.device.type != "meta":
        active = int((offsets.diff() > 0).sum())
    return Work(
        reads=[*moved([x, offsets]), (weight, active * rows * columns * weight.itemsize)],
        writes=moved(made),
        flops=2 * x.shape[0] * rows * columns,
        single=is_single(weight),
        host_staged=x.shape[0] > RING_TOKENS * experts,
    )


def routed_experts(ids: Tensor, experts: int) -> int:
    """How many experts a batch is routed to: counted, or on `meta` what even routing gives on average.

    Args:
        ids: (T, k).
        experts: E.
    """
    if ids.device.type != "meta":
        return int(ids.unique().numel())
    tokens, each = ids.shape
    return round(experts * (1 - (1 - each / experts) ** tokens))


RULES = {
    "offload::linear": linear,
    "offload::linear_out": linear,
    "offload::fused_experts": fused_experts,
    "offload::grouped_linear": grouped_linear,
}
