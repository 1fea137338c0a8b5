"""What an offloaded foreign module refuses while it is offloaded, and the one-forward-at-a-time rule.

The instance gets a class of its own, a subclass of what it was, and its own class back in the end. A hook would not
do: Ctrl-C skips the hook that would let the next thread in, and no hook sees `.to()`.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.device import Device
from offload.hooks import Hook


class Guarded:
    """Mixed into the class of an offloaded module; see `guard`."""


def is_guarded(module: nn.Module) -> bool:
    """Whether this module, or one inside it, is offloaded by `offload_`."""
    return any(isinstance(each, Guarded) for each in module.modules())


def guard(module: nn.Module, lock: threading.RLock, device: Device) -> None:
    """Let one thread at a time run `module`, on `device`, and refuse to move or convert it."""
    plain = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with lock, device.active():
            return plain.__call__(self, *args, **kwargs)

    def refuse_to_move(self: nn.Module, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"{plain.__name__} is offloaded and cannot be moved or converted (.to, .half, ...): restore() it first"
        )

    # The same names as its own class has, because they are what save_pretrained and error messages show.
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    module.__class__ = type(plain.__name__, (Guarded, plain), {**names, "__call__": call, "_apply": refuse_to_move})


def unguard(module: nn.Module) -> None:
    """Give a module its own class back."""
    if isinstance(module, Guarded):
        module.__class__ = type(module).__mro__[2]


class RefuseGrad(Hook):
    """Refuses to run a layer while autograd records: gradients of weights that move would be wrong."""

    __slots__ = ()

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled():
            raise ValueError(
                "the model is offloaded and runs without autograd only: use torch.inference_mode() or torch.no_grad(), "
                "or restore() it first"
            )


def refuse_grad(layer: nn.Module) -> RemovableHandle:
    """Make `layer` refuse to run while grad mode is on, before any other hook of it."""
    return layer.register_forward_pre_hook(RefuseGrad(), prepend=True)
