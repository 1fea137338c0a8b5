"""`offload_`: any torch model, offloaded where it stands, and given back bit for bit.

The same plan and the same backends as for our own models; only what they do not hold is different. Weights that stay
on the device are left where they are (moved, if they were elsewhere). Weights that go to the host are bound as new
parameters; the module's own `nn.Parameter` objects wait, emptied, in the handle, so that `restore()` brings back the
very objects, with their flags.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from offload.backend import Backend, make_backend, specs_of, weights_of
from offload.config import OffloadConfig
from offload.device import Device, open_device, require_memory
from offload.errors import ModelLoadError, OffloadConfigError, OffloadConfigWarning
from offload.guard import guard, is_guarded, refuse_grad, unguard
from offload.layers import find_layers
from offload.plan import Plan, plan
from offload.report import MemoryReport
from offload.text import quoted, shortened


@dataclass(eq=False)
class _Original:
    """A parameter or buffer as it was.

    Attributes:
        tensor: the module's own object; emptied while its weight is on the host.
        names: every name that it has in the module.
        device, size, stride: of the tensor.
        requires_grad: its flag.
    """

    tensor: Tensor
    names: list[str]
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Original:
        return cls(tensor, [], tensor.device, tensor.size(), tensor.stride(), tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        return self.size.numel() * self.tensor.element_size()

    def empty(self) -> Tensor:
        """Memory for it, where it was and as it was laid out."""
        if torch.empty(self.size).stride() == self.stride:
            return torch.empty(self.size, dtype=self.tensor.dtype, device=self.device)
        return torch.empty_strided(self.size, self.stride, dtype=self.tensor.dtype, device=self.device)


class Offloaded:
    """A model that was offloaded in place; what `offload_` returns. A context manager that closes.

    Attributes:
        plan: what is offloaded.
        config: what was asked for.
        layers: name of the `ModuleList` whose weights were considered.
    """

    def __init__(self, module: nn.Module, config: OffloadConfig, layers: str, device: Device, owned: ExitStack) -> None:
        self._module, self._device, self._owned = module, device, owned
        self._lock = threading.RLock()
        self._backend: Backend | None = None
        self._is_offloaded = False
        self._handles: list[Any] = []
        self.config, self.layers = config, layers
        parts = module.get_submodule(layers)
        weights = weights_of(module, list(parts))
        self.plan: Plan = plan(specs_of(weights), config)
        self.plan.require_offload()
        chosen = set(self.plan.offloaded)
        self._weights = [weight for weight in weights if weight.name in chosen]
        self._host, self._resident = _originals(module, chosen)

    # -- there ------------------------------------------------------------------------------------------------------

    def _offload(self) -> None:
        """Move everything to its place; whatever fails, the module is as it was."""
        try:
            self._backend = make_backend(self._weights, self.plan, self.config, self._device)
            with torch.inference_mode(False), torch.no_grad():
                self._move_resident()
                for original in self._host:
                    self._backend.destination(original.names[0]).copy_(original.tensor.data)
                    # One by one, so that no more than one weight exists twice.
                    _set_data(original.tensor, original.tensor.data.new_empty(0))
            layers = list(self._module.get_submodule(self.layers))
            self._backend.attach(self._module, layers)
            self._handles = [refuse_grad(layers[index]) for index in self.plan.offloaded_layers]
            guard(self._module, self._lock, self._device)
            self._is_offloaded = True
        except BaseException:
            self._undo({original: self._taken(original) for original in self._host})
            if self._backend is not None:
                self._backend.close()
            raise

    def _move_resident(self) -> None:
        place = self._device.torch_device
        for original in self._resident:
            if original.device != place:
                _set_data(original.tensor, original.tensor.data.to(place))
            if isinstance(original.tensor, nn.Parameter):
                original.tensor.requires_grad_(False)

    # -- and back ---------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Give the module its weights back, bit for bit, on their old devices, with their flags. Idempotent.

        Waits for a forward that runs in another thread.

        Raises:
            ModelLoadError: an old device lacks the memory; the module stays offloaded and usable.
        """
        with self._lock:
            if not self._is_offloaded:
                return
            self._require_room()
            with torch.inference_mode(False), torch.no_grad():
                self._device.synchronise()
                back = {original: self._taken(original) for original in self._host}
            self._undo(back)

    def _require_room(self) -> None:
        needed_bytes: dict[torch.device, int] = {}
        for original in (*self._host, *self._resident):
            if original in self._host or original.tensor.device != original.device:
                needed_bytes[original.device] = needed_bytes.get(original.device, 0) + original.nbytes
        for place, nbytes in needed_bytes.items():
            on_host = place.type == "cpu" and not self._device.unified and self._device.torch_device.type != "meta"
            memory = self._device.host_memory() if on_host else self._device.device_memory()
            require_memory(f"{place} to restore the weights", nbytes, memory, "free some; the model stays offloaded")

    def _taken(self, original: _Original) -> Tensor:
        """The weight of `original` in memory of its own, where it was: from the slab if it has gone there."""
        if original.tensor.data.numel() == original.size.numel():
            return original.tensor.data
        return original.empty().copy_(self._backend.destination(original.names[0]))

    def _undo(self, back: Mapping[_Original, Tensor]) -> None:
        """Bind the module's own parameters again, with these weights."""
        self._is_offloaded = False
        unguard(self._module)
        while self._handles:
            self._handles.pop().remove()
        if self._backend is not None:
            self._backend.detach()
        with torch.inference_mode(False), torch.no_grad():
            for original, tensor in back.items():
                _set_data(original.tensor, tensor)
                for name in original.names:
                    path, _, leaf = name.rpartition(".")
                    self._module.get_submodule(path)._parameters[leaf] = original.tensor
            for original in self._resident:
                if original.tensor.device != original.device:
                    _set_data(original.tensor, original.tensor.data.to(original.device))
            for original in (*self._host, *self._resident):
                original.tensor.requires_grad_(original.requires_grad)

    def close(self) -> None:
        """Restore the module if that has not been done, then give the host memory back. Idempotent.

        Raises:
            ModelLoadError: an old device lacks the memory; the module stays offloaded and usable.
        """
        with self._lock:
            self.restore()
            if self._backend is not None:
                self._backend.close()
            self._owned.close()

    # -- asking -----------------------------------------------------------------------------------------------------

    def report(self) -> MemoryReport:
        """Count the memory of the weights: what the backend holds, and the parameters that stay on the device."""
        report = self._backend.report()
        resident = (each for each in self._resident if isinstance(each.tensor, nn.Parameter))
        return replace(report, resident_bytes=sum(original.nbytes for original in resident))

    def __enter__(self) -> Offloaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def offload_(
    module: nn.Module,
    config: OffloadConfig | Mapping[str, Any] | str,
    *,
    layers: str | None = None,
    device: Device | str | None = None,
) -> Offloaded:
    """Offload part of a model's weights to the host, in place.

    The module keeps its type, its parameters' names and its hooks; `forward` and `generate` work as before, without
    autograd. `nn.Linear` layers with a host weight read it in place by our kernels, everything else reads it through
    a device view (uva), or both read it from device slots (prefetch).

    Args:
        module: any model with its weights, from transformers or diffusers or your own.
        config: vLLM's OffloadConfig as JSON text, dict or object; selectors match the module's own names.
        layers: name of the `ModuleList` with the decoder layers; None takes the one with the most parameter bytes.
        device: where it runs, a name for `open_device` or an open device; None takes the GPU that the module is on,
            else a GPU if there is one, else the CPU.

    Returns:
        The handle: `report()`, `restore()`, `close()`.

    Raises:
        OffloadConfigError: the configuration is wrong or would offload nothing on this module.
        ModelLoadError: it does not fit, or the device is not there.
        ValueError: the module is offloaded already, has gradients, or has weights that cannot be moved.
    """
    config = OffloadConfig.of(config)
    if not config.is_offloading_enabled():
        raise OffloadConfigError(
            "the offload config is not enabled, so offload_ would do nothing: set uva.cpu_offload_gb or "
            "prefetch.offload_group_size"
        )
    _require_movable(module)
    path, _ = find_layers(module, layers)
    with ExitStack() as owned:
        if not isinstance(device, Device):
            device = open_device(device or _own_gpu(module))
            owned.callback(device.close)
        if device.unified:
            raise ModelLoadError(f"{device.name} shares its memory with the host: offloading would free nothing there")
        handle = Offloaded(module, config, path, device, owned)
        for text in (*config.warnings, *handle.plan.warnings):
            warnings.warn(text, OffloadConfigWarning, stacklevel=2)
        handle._offload()
        handle._owned = owned.pop_all()
        return handle


def _require_movable(module: nn.Module) -> None:
    if is_guarded(module):
        raise ValueError(f"{type(module).__name__} is offloaded already: close() its handle first")
    with_grad = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
    if with_grad:
        raise ValueError(f"{quoted(with_grad, 1)} has a gradient: finish the training step and call zero_grad() first")
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
            kind = f"{type(parameter).__name__}, {parameter.layout}"
            raise ValueError(f"weight {shortened(name)} is no plain dense parameter ({kind}): it cannot be offloaded")
        if parameter.is_meta:
            raise ValueError(f"weight {shortened(name)} has no data (it is on meta): load the weights first")


def _own_gpu(module: nn.Module) -> str | None:
    places = {str(parameter.device) for parameter in module.parameters() if parameter.device.type == "cuda"}
    if len(places) > 1:
        raise ValueError(f"the module is spread over {quoted(sorted(places))}: one GPU per process is supported")
    return places.pop() if places else None


def _originals(module: nn.Module, chosen: set[str]) -> tuple[list[_Original], list[_Original]]:
    """The parameters that go to the host, and the parameters and buffers that stay, each once with all its names."""
    host: dict[int, _Original] = {}
    resident: dict[int, _Original] = {}
    for name, tensor in _named_tensors(module):
        kind = host if name in chosen else resident
        kind.setdefault(id(tensor), _Original.of(tensor)).names.append(name)
    return list(host.values()), list(resident.values())


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """Give a parameter or buffer other bytes; the object, and whoever holds it, stays."""
    tensor.data = data
