"""`offload_`: any torch model, offloaded where it stands, and given back bit for bit.

The same plan and the same backends as for our own models; only what they do not hold is different. Weights that stay
on the device are left where they are (moved, if they were elsewhere). Weights that go to the host are bound as new
parameters; the module's own `nn.Parameter` objects wait, emptied, in the handle, so that `restore()` brings back the
very objects, with their flags.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from offload.backend import Backend, make_backend, specs_of, weights_of
from offload.config import OffloadConfig
from offload.device import Device, open_device, require_memory
from offload.errors import ModelLoadError, OffloadConfigError, OffloadConfigWarning
from offload.guard import guard, guard_layers, is_guarded, unguard
from offload.hooks import remove_hooks
from offload.layers import find_layers
from offload.originals import Original, originals_of
from offload.plan import Plan, plan
from offload.report import MemoryReport
from offload.text import quoted, shortened


class Offloaded:
    """A model that was offloaded in place; what `offload_` returns. A context manager that closes.

    Attributes:
        plan: what is offloaded.
        config: what was asked for.
        layers: name of the `ModuleList` whose weights were considered.
    """

    def __init__(self, module: nn.Module, config: OffloadConfig, layers: str | None, device: Device) -> None:
        self._module, self._device = module, device
        self._owned = ExitStack()
        self._lock = threading.RLock()
        self._backend: Backend | None = None
        self._is_offloaded = False
        self.config = config
        self.layers, self._parts = find_layers(module, layers)
        weights = weights_of(module, self._parts)
        self.plan: Plan = plan(specs_of(weights), config)
        self.plan.require_offload()
        chosen = set(self.plan.offloaded)
        self._weights = [weight for weight in weights if weight.name in chosen]
        self._host, self._resident = originals_of(module, chosen)

    # -- there ------------------------------------------------------------------------------------------------------

    def _offload(self, owned: ExitStack) -> None:
        """Move everything to its place, and own what the handle closes; whatever fails, the module is as it was."""
        try:
            self._backend = make_backend(self._weights, self.plan, self.config, self._device)
            with torch.inference_mode(False), torch.no_grad():
                self._move_resident()
                for original in self._host:
                    self._backend.destination(original.names[0]).copy_(original.tensor.data)
                    # One by one, so that no more than one weight exists twice.
                    original.empty()
            self._backend.attach(self._module, self._parts)
            layers = [self._parts[index] for index in self.plan.offloaded_layers]
            guard_layers(self._module, layers, self._passing())
            guard(self._module, self._lock, self._device)
            self._is_offloaded = True
            self._owned = owned.pop_all()
        except BaseException:
            _insist(self._roll_back)
            raise

    def _roll_back(self) -> None:
        self._undo(self._all_taken())
        if self._backend is not None:
            self._backend.close()

    def _move_resident(self) -> None:
        for original in self._resident:
            original.move_to(self._device.torch_device)
            if isinstance(original.tensor, nn.Parameter):
                original.freeze()

    def _passing(self) -> set[str]:
        """Offloaded parameters that are not read where they lie: what they see is another layer's a moment later."""
        return {
            name for name in self.plan.offloaded if self._device.residency(self._module.get_parameter(name)) != "host"
        }

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
            self._device.synchronise()
            back = self._all_taken()
            _insist(lambda: self._undo(back))

    def _require_room(self) -> None:
        needed_bytes: dict[torch.device, int] = {}
        for original in (*self._host, *self._resident):
            if original in self._host or original.tensor.device != original.device:
                needed_bytes[original.device] = needed_bytes.get(original.device, 0) + original.nbytes
        for place, nbytes in needed_bytes.items():
            on_host = place.type == "cpu" and not self._device.unified and self._device.torch_device.type != "meta"
            memory = self._device.host_memory() if on_host else self._device.device_memory()
            require_memory(f"{place} to restore the weights", nbytes, memory, "free some; the model stays offloaded")

    def _all_taken(self) -> dict[Original, Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            return {original: self._taken(original) for original in self._host}

    def _taken(self, original: Original) -> Tensor:
        """The weight of `original` in memory of its own, where it was: from the slab if it has gone there."""
        if original.tensor.data.numel() == original.size.numel():
            return original.tensor.data
        return original.copy_of(self._backend.destination(original.names[0]))

    def _undo(self, back: Mapping[Original, Tensor]) -> None:
        """Bind the module's own parameters again, with these weights. Every step of it can be taken twice."""
        unguard(self._module)
        if self._backend is not None:
            self._backend.detach()
        remove_hooks(self._module)
        with torch.inference_mode(False), torch.no_grad():
            for original, tensor in back.items():
                original.hold(tensor)
                for name in original.names:
                    path, _, leaf = name.rpartition(".")
                    self._module.get_submodule(path)._parameters[leaf] = original.tensor
            for original in self._resident:
                original.move_to(original.device)
            for original in (*self._host, *self._resident):
                original.freeze(False)
        self._is_offloaded = False

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

    Layers have to be called as modules: one whose `forward` or parts are run without it raises, because its weights
    are brought by the call. Keep the handle: without it the module works, and cannot be restored.

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
    with ExitStack() as owned:
        if not isinstance(device, Device):
            device = open_device(device or _own_gpu(module))
            owned.callback(device.close)
        if device.unified:
            raise ModelLoadError(f"{device.name} shares its memory with the host: offloading would free nothing there")
        handle = Offloaded(module, config, layers, device)
        for text in (*config.warnings, *handle.plan.warnings):
            warnings.warn(text, OffloadConfigWarning, stacklevel=2)
        handle._offload(owned)
        return handle


def _insist(action: Callable[[], None]) -> None:
    """Do what may be begun again, to its end, though Ctrl-C comes in the middle of it."""
    try:
        action()
    except KeyboardInterrupt:
        action()
        raise


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
        if any(stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
            raise ValueError(f"weight {shortened(name)} is expanded over one memory: make it contiguous() first")
        if parameter.is_meta:
            raise ValueError(f"weight {shortened(name)} has no data (it is on meta): load the weights first")


def _own_gpu(module: nn.Module) -> str | None:
    places = {str(parameter.device) for parameter in module.parameters() if parameter.device.type == "cuda"}
    if len(places) > 1:
        raise ValueError(f"the module is spread over {quoted(sorted(places))}: one GPU per process is supported")
    return places.pop() if places else None
