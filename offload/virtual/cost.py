"""What torch's operators cost: the bytes that they read and write, and their FLOPs.

The rule for an operator without one of its own: it reads every tensor it is given, writes every tensor it makes, and
reads and writes those it changes in place. Exceptions are listed here: table look-ups read what they return, `copy_`
and `fill_` write without reading, scatters write the values. A matrix product of torch that reads its weight from the
host reads it once per block of rows, since host memory is not cached on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from offload.virtual import own_kernels
from offload.virtual.operators import Operator, flatten, mutated, unique_bytes
from offload.virtual.work import Work, is_single, moved

BLOCK_ROWS = 128
"""Rows of x that one block of an ordinary tiled GEMM covers; cuBLAS and CUTLASS prefer 128 for 16-bit products."""

Rule = Callable[[Sequence[Any], dict[str, Any], list[Tensor]], Work]
WITHOUT_WORK = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
"""Operators that make memory and put nothing into it."""

DECOMPOSED = {"einsum", "tensordot", "inner", "conv1d", "conv2d", "conv3d", "linalg_multi_dot", "chain_matmul"}
"""Operators that are made of products, and whose FLOPs show only in their parts."""

_SCATTERS = {"index_put_", "_index_put_impl_", "index_copy_", "scatter_"}


def work_of(
    known: Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: list[Tensor], out: Any
) -> Work | None:
    """Say what a call costs; None if it only makes a view or unwritten memory.

    Args:
        known: the operator.
        func, args, kwargs: the call.
        made: tensors of the result with storage of their own.
        out: the result.
    """
    changed = mutated(known, args, kwargs)
    if (not made and not changed) or known.name in WITHOUT_WORK:
        return None
    if rule := RULES.get(known.name):
        return rule(args, kwargs, made)
    given = flatten(args) + flatten(list(kwargs.values()))
    identities = {id(tensor) for tensor in changed}
    others = [tensor for tensor in given if id(tensor) not in identities]
    written = moved(changed)
    if known.name in _SCATTERS and others:
        written = [(changed[0], min(unique_bytes(changed[0]), max(map(unique_bytes, others))))]
    work = Work(reads=moved(others if known.overwrites else given), writes=written + moved(made))
    formula = flop_registry.get(getattr(func, "overloadpacket", None))
    if formula is not None:
        work.flops, work.single = int(formula(*args, **kwargs, out_val=out)), is_single(given[0])
    return work


def _matrix_product(rows: int, weight: Tensor, others: list[Tensor], made: list[Tensor], flops: int) -> Work:
    passes = max(1, -(-rows // BLOCK_ROWS))
    single = is_single(weight)
    return Work(reads=moved([*others, weight]), writes=moved(made), flops=flops, single=single, host_passes=passes)


def _linear(args: Sequence[Any], kwargs: dict[str, Any], made: list[Tensor]) -> Work:
    x, weight = args[:2]
    others = [x, *flatten(list(args[2:])), *flatten(list(kwargs.values()))]
    return _matrix_product(x.numel() // max(x.shape[-1], 1), weight, others, made, 2 * x.numel() * weight.shape[0])


def _product(left: int, right: int) -> Rule:
    """A product of arguments `left` and `right`; what stands before them is added."""

    def rule(args: Sequence[Any], kwargs: dict[str, Any], made: list[Tensor]) -> Work:
        x, weight = args[left], args[right]
        elements = sum(tensor.numel() for tensor in made) or x.numel() // max(x.shape[-1], 1) * weight.shape[-1]
        rows = x.numel() // max(x.shape[-1], 1)
        flops = 2 * elements * x.shape[-1]
        others = [*flatten(list(args[:left])), x]
        return _matrix_product(rows, weight, others, made + flatten([kwargs.get("out")]), flops)

    return rule


def _matrix_vector(matrix: int) -> Rule:
    """A matrix, argument number `matrix`, times the vector after it."""

    def rule(args: Sequence[Any], kwargs: dict[str, Any], made: list[Tensor]) -> Work:
        flops = 2 * args[matrix].numel()
        return Work(reads=moved(flatten(args)), writes=moved(made), flops=flops, single=is_single(args[matrix]))

    return rule


def _attention(args: Sequence[Any], kwargs: dict[str, Any], made: list[Tensor]) -> Work:
    query, key, value = args[:3]
    rows, length = query.shape[-2], key.shape[-2]
    causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
    # A causal kernel skips the pairs above the diagonal.
    pairs = rows * length - (min(rows, length) * (min(rows, length) - 1) // 2 if causal else 0)
    heads = query.numel() // max(rows * query.shape[-1], 1)
    return Work(
        reads=moved(flatten(args) + flatten(list(kwargs.values()))),
        writes=moved(made),
        flops=2 * heads * pairs * (query.shape[-1] + value.shape[-1]),
        single=is_single(query),
    )


def _look_up(args: Sequence[Any], kwargs: dict[str, Any], made: list[Tensor]) -> Work:
    taken = sum(unique_bytes(tensor) for tensor in made)
    rest = flatten(list(args[1:])) + flatten(list(kwargs.values()))
    return Work(reads=[(args[0], taken), *moved(rest)], writes=moved(made))


RULES: dict[str, Rule] = {
    "linear": _linear,
    "mm": _product(0, 1),
    "bmm": _product(0, 1),
    "matmul": _product(0, 1),
    "addmm": _product(1, 2),
    "baddbmm": _product(1, 2),
    "mv": _matrix_vector(0),
    "addmv": _matrix_vector(1),
    "scaled_dot_product_attention": _attention,
    "embedding": _look_up,
    "index": _look_up,
    "index_select": _look_up,
    "gather": _look_up,
    "take": _look_up,
    **own_kernels.RULES,
}
