"""Which modules of a foreign model are its decoder layers.

A layer is what runs when it is called: that is when its weights are brought. An entry of the list that is itself a list
or dictionary of modules (`for attention, mlp in self.layers`) is never called, so the modules in it are the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from offload.errors import OffloadConfigError
from offload.text import gib, quoted, shortened


def find_layers(module: nn.Module, path: str | None = None) -> tuple[str, list[nn.Module]]:
    """Find the layers whose weights may be offloaded.

    Args:
        module: any model.
        path: name of the `ModuleList` to take, "transformer.h"; None takes the one with the most parameter bytes, the
            outermost of those that tie.

    Returns:
        The name of the list, and its layers.

    Raises:
        OffloadConfigError: there is no such list; names those that there are.
    """
    sizes_bytes = {name: _parameter_bytes(each) for name, each in _lists(module).items()}
    if path is None:
        if not any(sizes_bytes.values()):
            raise OffloadConfigError(
                f"{type(module).__name__} has no ModuleList with parameters, so it has no decoder layers to offload: "
                "give a module that has"
            )
        path = max(sizes_bytes, key=sizes_bytes.__getitem__)
    elif path not in sizes_bytes:
        raise OffloadConfigError(
            f"layers {shortened(path)} names no ModuleList of {type(module).__name__}: {_choices(sizes_bytes)}"
        )
    elif not sizes_bytes[path]:
        raise OffloadConfigError(f"layers {shortened(path)} has no parameters: {_choices(sizes_bytes)}")
    return path, list(_called(_lists(module)[path]))


def _lists(module: nn.Module) -> dict[str, nn.ModuleList]:
    """Every list by name, outer ones before those inside them."""
    return {name: each for name, each in module.named_modules() if isinstance(each, nn.ModuleList)}


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules below this one that have a `forward`."""
    for child in module._modules.values():  # children() leaves out a layer that is listed again
        if child is None:
            continue
        if getattr(child.forward, "__func__", None) is nn.Module.forward:
            yield from _called(child)
        else:
            yield child


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _choices(sizes_bytes: Mapping[str, int]) -> str:
    usable = sorted((name for name, nbytes in sizes_bytes.items() if nbytes), key=lambda name: -sizes_bytes[name])
    if not usable:
        return "it has none with parameters"
    return f"choose one of {quoted(f'{name} ({gib(sizes_bytes[name])})' for name in usable)}"
