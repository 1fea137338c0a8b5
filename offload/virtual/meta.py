"""Operators on `meta`: shapes without numbers, so that a model of any size runs.

Meta kernels are Python and take most of the time of a step, so the result of an operator is remembered by its shapes:
the same function of the same shapes, strides and scalars makes the same empty tensors. Views are not remembered,
since they share a storage; an operator that changes its argument returns it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.virtual.operators import Operator, flatten


class _Empty(NamedTuple):
    """What is remembered of one result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class MetaNumerics:
    """Makes the results of operators on `meta` tensors.

    Attributes:
        remember: False runs every meta kernel; for tests that the shortcut changes nothing.
    """

    def __init__(self) -> None:
        self.remember = True
        self._results: dict[Any, Any] = {}

    def allocate(self, nbytes: int) -> Tensor:
        """Return uint8 (nbytes,) without bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def run(self, func: Any, known: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what the operator returns, empty."""
        if not self.remember:
            return _call(func, known, args, kwargs)
        if known.mutated and len(func._schema.returns) == 1 and isinstance(args[known.mutated[0]], Tensor):
            return args[known.mutated[0]]
        key = (func, _key(args), _key(tuple(kwargs.items())))
        result = self._results.get(key)
        if isinstance(result, _Empty):
            return result.make()
        if isinstance(result, (list, tuple)):
            return type(result)(one.make() for one in result)
        out = _call(func, known, args, kwargs)
        if result is None:
            self._results[key] = _describe(out, args, kwargs)
        return out

    def again(self, func: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor]) -> None:
        """A captured operator has nothing to compute again."""


def _call(func: Any, known: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    if known.name == "scaled_dot_product_attention" and out.shape == args[0].shape:
        # Kernels lay their result out as the query; the meta kernel makes it contiguous, so that a view would copy it.
        return torch.empty_like(args[0])
    return out


_VIEW = "a view, or a result that cannot be remembered"


def _describe(out: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = {tensor.untyped_storage()._cdata for tensor in (*flatten(args), *flatten(list(kwargs.values())))}
    made = flatten(out)
    if not made or any(tensor.untyped_storage()._cdata in given for tensor in made):
        return _VIEW
    if isinstance(out, Tensor):
        return _shape(out)
    shapes = [_shape(one) for one in made]
    return shapes if isinstance(out, list) else tuple(shapes)


def _shape(tensor: Tensor) -> _Empty:
    return _Empty(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _key(values: Any) -> Any:
    parts = []
    for value in values:
        if isinstance(value, Tensor):
            parts.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            parts.append(_key(value))
        else:
            parts.append((type(value), value))  # 1, 1.0 and True are equal, but not to an operator
    return tuple(parts)
