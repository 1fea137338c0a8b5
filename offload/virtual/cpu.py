"""Operators on CPU tensors: real numbers, so that tokens can be compared.

They are the numbers of our models on a CPU, bit for bit: one row of bf16 is multiplied as `Linear` does it there.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.device import require_memory
from offload.host import free_host_memory, map_anonymous
from offload.linear import is_vector, matrix_vector
from offload.virtual.operators import Operator, flatten, operator

_LINEAR = {"linear", "offload::linear"}


class CpuNumerics:
    """Operators really run, in the order in which they are issued, in memory of this machine."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return uint8 (nbytes,), aligned to a page.

        Raises:
            NotEnoughMemoryError: this machine does not have it, whatever the profile says.
        """
        place = "this machine, which holds the numbers of the virtual GPU"
        require_memory(place, nbytes, free_host_memory(), "simulate without numbers: load format meta")
        return map_anonymous(nbytes)

    def run(self, func: Any, known: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what the operator returns."""
        if known.name in _LINEAR and not kwargs and is_vector(args[0]):
            return matrix_vector(*args[:3])
        return func(*args, **kwargs)

    def again(self, func: Any, args: Any, kwargs: dict[str, Any], made: list[torch.Tensor]) -> None:
        """Run a captured operator again and put its results where the capture's went."""
        out = self.run(func, operator(func), args, kwargs)
        if len(made) == 1 and isinstance(out, torch.Tensor):
            made[0].copy_(out)
        elif made:
            given = {tensor.untyped_storage()._cdata for tensor in (*flatten(args), *flatten(list(kwargs.values())))}
            fresh = [tensor for tensor in flatten(out) if tensor.untyped_storage()._cdata not in given]
            for target, result in zip(made, fresh, strict=True):
                target.copy_(result)
