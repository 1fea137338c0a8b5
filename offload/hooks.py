"""What the hooks of all backends have in common: they name the layer that runs, and they cannot be copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.device import Device

UNCOPYABLE = (
    "an offloaded model cannot be copied or pickled: its weights live in host memory and slots that belong to this "
    "one; restore it first, or save its state_dict()"
)


class Hook:
    """A hook object bound to one module of one offloaded model.

    A copy would share its slots and host memory with the original and overwrite them, so copying a module that carries
    one is refused, by `copy.deepcopy` and by pickle alike.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ValueError(UNCOPYABLE)

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__({})


class _EnterLayer(Hook):
    __slots__ = ("_device", "_layer")

    def __init__(self, device: Device, layer: int | None) -> None:
        self._device, self._layer = device, layer

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._device.enter_layer(self._layer)


def remove_hooks(model: nn.Module) -> None:
    """Remove every hook of ours from a model and its parts, also one whose handle Ctrl-C took away."""
    for module in model.modules():
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._state_dict_hooks,
            module._load_state_dict_pre_hooks,
        ):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "hook", hook), Hook):  # torch wraps those of load_state_dict
                    del hooks[key]


def name_layers(layers: Sequence[nn.Module], device: Device) -> list[RemovableHandle]:
    """Tell an observing device which layer runs; what a backend issues around a layer belongs to it."""
    handles = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(_EnterLayer(device, index), prepend=True))
        handles.append(layer.register_forward_hook(_EnterLayer(device, None)))
    return handles
