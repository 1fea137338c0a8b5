"""What an offloaded foreign module refuses while it is offloaded, and the one-forward-at-a-time rule.

The instance gets a class of its own, a subclass of what it was, and its own class back in the end. A hook would not
do: Ctrl-C skips the hook that would let the next thread in, and no hook sees `.to()`.

Weights are brought when a layer is called. A model that runs the parts of a layer, or its `forward`, without calling
it would compute with another layer's weights, so parts whose weights come and go refuse to run outside their layer.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from offload.device import Device
from offload.hooks import UNCOPYABLE, Hook
from offload.text import shortened

_WITHOUT_GRAD = (
    "the model is offloaded and runs without autograd only: use torch.inference_mode() or torch.no_grad(), or "
    "restore() it first"
)


class Guarded:
    """Mixed into the class of an offloaded module; see `guard`."""


def is_guarded(module: nn.Module) -> bool:
    """Whether this module, one inside it, or one that it is a part of, is offloaded by `offload_`."""
    return any(isinstance(each, Guarded) or _Enter.is_on(each) for each in module.modules())


def guard(module: nn.Module, lock: threading.RLock, device: Device) -> None:
    """Let one thread at a time run `module`, on `device`, and refuse to move, convert or copy it."""
    plain = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if device.simulated and torch.is_grad_enabled():
            raise ValueError(_WITHOUT_GRAD)  # an observed forward has grad mode off, and no layer would see it
        with lock, device.active(foreign=True):
            return plain.__call__(self, *args, **kwargs)

    def refuse_to_move(self: nn.Module, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"{plain.__name__} is offloaded and cannot be moved or converted (.to, .half, ...): restore() it first"
        )

    def refuse_to_copy(self: nn.Module, _: Any) -> NoReturn:
        raise ValueError(UNCOPYABLE)

    # The same names as its own class has, because they are what save_pretrained and error messages show.
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    changed = {"__call__": call, "_apply": refuse_to_move, "__reduce_ex__": refuse_to_copy}
    module.__class__ = type(plain.__name__, (Guarded, plain), {**names, **changed})


def unguard(module: nn.Module) -> None:
    """Give a module its own class back."""
    if isinstance(module, Guarded):
        module.__class__ = type(module).__mro__[2]


def guard_layers(model: nn.Module, layers: Sequence[nn.Module], passing: Container[str]) -> None:
    """Make layers refuse to run while grad mode is on, and their parts to run outside of them.

    Args:
        model: what the names below are names in.
        layers: those with offloaded weights.
        passing: parameters that look at memory which other layers use too.
    """
    running = _Running()
    layers_of: dict[nn.Module, list[nn.Module]] = {}
    for layer in dict.fromkeys(layers):
        layer.register_forward_pre_hook(_Enter(running), prepend=True)
        layer.register_forward_hook(_Leave(running))
        for part in layer.modules():
            layers_of.setdefault(part, []).append(layer)
    for path, part in model.named_modules():
        around = layers_of.get(part, [])
        comes_and_goes = any(f"{path}.{leaf}" in passing for leaf in part._parameters)
        if around and part not in around and comes_and_goes:
            part.register_forward_pre_hook(_InsideLayer(running, path, around), prepend=True)


class _Running:
    """Which of the layers with offloaded weights is running; None between them."""

    __slots__ = ("layer",)

    def __init__(self) -> None:
        self.layer: nn.Module | None = None


class _Enter(Hook):
    """Refuses to run a layer while autograd records: gradients of weights that move would be wrong."""

    __slots__ = ("_running",)

    def __init__(self, running: _Running) -> None:
        self._running = running

    @classmethod
    def is_on(cls, module: nn.Module) -> bool:
        return any(isinstance(hook, cls) for hook in module._forward_pre_hooks.values())

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled():
            raise ValueError(_WITHOUT_GRAD)
        self._running.layer = module


class _Leave(Hook):
    __slots__ = ("_running",)

    def __init__(self, running: _Running) -> None:
        self._running = running

    def __call__(self, *_: Any) -> None:
        self._running.layer = None


class _InsideLayer(Hook):
    """Refuses to run a part of a layer whose weights nobody has brought."""

    __slots__ = ("_layers", "_path", "_running")

    def __init__(self, running: _Running, path: str, layers: Sequence[nn.Module]) -> None:
        self._running, self._path, self._layers = running, path, layers

    def __call__(self, *_: Any) -> None:
        if not any(layer is self._running.layer for layer in self._layers):
            raise ValueError(
                f"{shortened(self._path)} ran without its layer being called, so its offloaded weights are not there: "
                "call the layer itself and not its parts or its forward, or offload another list (layers=)"
            )
