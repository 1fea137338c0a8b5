"""What is known of an operator before it runs: its schema, and which bytes its tensors span."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Operator:
    """One overload, as far as charging it needs to know.

    Attributes:
        name: "linear", or "offload::linear" outside torch's own namespace.
        mutated: positions of arguments that are changed in place.
        mutated_names: the same for arguments given by name.
        overwrites: the changed argument is not read.
        refused: why it must not be used on a device, or "".
    """

    name: str
    mutated: tuple[int, ...]
    mutated_names: tuple[str, ...]
    overwrites: bool
    refused: str


_FILLS = {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "exponential_"}
_SCATTERS = {"index_put_", "_index_put_impl_", "index_copy_", "scatter_", "masked_fill_"}
_DECIDES_ON_THE_HOST = {"is_nonzero", "equal", "allclose"}  # torch does not tag these
_operators: dict[Any, Operator] = {}


def operator(func: Any) -> Operator:
    """Describe an overload from its schema; remembered."""
    known = _operators.get(func)
    if known is None:
        known = _operators[func] = _read_schema(func)
    return known


def _read_schema(func: Any) -> Operator:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    written = [
        (i, argument)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    refused = ""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    if name in _DECIDES_ON_THE_HOST or any(tag in func.tags for tag in tags):
        refused = "it needs values on the host; use Device.to_host, or an operator whose result has a known size"
    return Operator(
        name,
        tuple(i for i, argument in written if not argument.kwarg_only),
        tuple(argument.name for _, argument in written),
        name in _FILLS or name in _SCATTERS or any(argument.is_out for _, argument in written),
        refused,
    )


def flatten(values: Any) -> list[Tensor]:
    """The tensors among arguments or results, one level of lists deep."""
    if isinstance(values, Tensor):
        return [values]
    found: list[Tensor] = []
    for value in values if isinstance(values, (tuple, list)) else ():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


def indexes_by_integers(args: Sequence[Any]) -> bool:
    """Whether `index(x, indices)` has a result of known size; a mask's depends on its values."""
    return not any(index.dtype in (torch.bool, torch.uint8) for index in flatten(args[1]))


def mutated(known: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call changes in place."""
    found = [args[i] for i in known.mutated if i < len(args)]
    found += [kwargs[name] for name in known.mutated_names if name in kwargs]
    return flatten(found)


def unique_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, an expanded dimension counted once."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.itemsize
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(sizes) * tensor.itemsize


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """First byte and byte past the end of what a tensor spans in its storage."""
    size = tensor.itemsize
    start = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    if tensor.numel() == 0:
        return start, start
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size
