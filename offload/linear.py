"""A linear layer whose weight is read where it lies, in host memory, by our kernels.

An existing `nn.Linear` becomes one by its instance's class, and is given its class back afterwards: no class is
patched, and nothing else about the module changes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offload_kernels import linear

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class HostLinear(nn.Linear):
    """`nn.Linear` whose weight is a device view of page-locked host memory; the bias is on the device."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N); on CPU tensors this is torch's own product."""
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # torch refuses to answer for meta
            # Autocast makes a weight of another dtype first: the bus is crossed by that, once.
            return super().forward(x)
        return linear(x, self.weight, self.bias)


def read_in_place(module: nn.Module) -> bool:
    """Make a plain `nn.Linear` of a dtype and layout that our kernels take use them; returns whether `module` does now.

    Everything else works on the view as it is: a subclass has a forward of its own.
    """
    if type(module) is nn.Linear and module.weight.dtype in _DTYPES and module.weight.stride(-1) == 1:
        module.__class__ = HostLinear
    return type(module) is HostLinear


def restore_class(module: nn.Module) -> None:
    """Undo `read_in_place`."""
    if type(module) is HostLinear:
        module.__class__ = nn.Linear
