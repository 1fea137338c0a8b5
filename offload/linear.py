"""Linear layers whose weight may be read where it lies, in host memory, by our kernels.

An existing layer changes by its instance's class, and is given its class back afterwards: no class is patched, and
nothing else about the module changes. Foreign modules have `nn.Linear`, our own models `Linear`; each has its twin for
a host weight, with the same bits on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from offload_kernels import linear
from offload_kernels.dense import observed

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class HostLinear(nn.Linear):
    """`nn.Linear` whose weight is a device view of page-locked host memory; the bias is on the device."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N); on CPU tensors this is torch's own product."""
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # torch refuses to answer for meta
            # Autocast makes a weight of another dtype first: the bus is crossed by that, once.
            return super().forward(x)
        return linear(x, self.weight, self.bias)


class Linear(nn.Linear):
    """The linear layer of our own models: on a CPU, one row of bf16 is a matrix-vector product.

    torch sends `F.linear` of one bf16 row to a general product that reads the weight more slowly than `mv` does:
    225 us instead of 151 for (960, 576) on one core of an AVX-512 Xeon. In fp16 `mv` is the slower one, in fp32 they
    are equal. `python -m bench generate` times both ways.
    """

    _product = staticmethod(functional.linear)

    def reset_parameters(self) -> None:
        """Leave the weight as it is: it is loaded. (Drawing random numbers on `meta` imports a compiler, for 1.5 s.)"""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N)."""
        if is_vector(x) and not observed():
            return matrix_vector(x, self.weight, self.bias)
        return self._product(x, self.weight, self.bias)


class HostModelLinear(Linear):
    """`Linear` whose weight is a device view of page-locked host memory; the bias is on the device."""

    _product = staticmethod(linear)


def is_vector(x: Tensor) -> bool:
    """Whether `matrix_vector` is the quicker way to multiply x (..., K): one row of bf16 on a CPU."""
    return x.is_cpu and x.dtype is torch.bfloat16 and x.numel() == x.shape[-1]


def matrix_vector(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K) of one row, weight (N, K) -> (..., N)."""
    row = x.reshape(-1)
    product = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
    return product.view(*x.shape[:-1], -1)


_TWINS: dict[type[nn.Linear], type[nn.Linear]] = {nn.Linear: HostLinear, Linear: HostModelLinear}
_ORIGINALS = {twin: original for original, twin in _TWINS.items()}


def read_in_place(module: nn.Module) -> bool:
    """Make a linear layer of a dtype and layout that our kernels take use them; returns whether `module` does now.

    Everything else works on the view as it is: another subclass has a forward of its own.
    """
    if type(module) in _TWINS and module.weight.dtype in _DTYPES and module.weight.stride(-1) == 1:
        module.__class__ = _TWINS[type(module)]
    return type(module) in _ORIGINALS


def restore_class(module: nn.Module) -> None:
    """Undo `read_in_place`."""
    if type(module) in _ORIGINALS:
        module.__class__ = _ORIGINALS[type(module)]
