"""What both ways of offloading share: the host slab, true state dicts, and the refusal to be copied.

While the model runs a parameter may look at a slot or a staging buffer, which holds another layer's weight a moment
later. `state_dict()` therefore gives what is in the slab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from offload.backend import Backend
from offload.errors import ModelLoadError
from offload.hooks import Hook
from offload.host import HostSlab
from offload.report import MemoryReport


class OffloadingBackend(Backend):
    """A backend with part of its weights in a host slab."""

    _slab: HostSlab | None = None

    def _needed_bytes(self) -> tuple[int, int]:
        host_bytes, device_bytes = super()._needed_bytes()
        return host_bytes + sum(self._plan.region_bytes), device_bytes

    def _reserve(self) -> None:
        self._slab = HostSlab([self._weights[name] for name in self._plan.offloaded], self._device)
        for name in self._plan.offloaded:
            self._tensors.setdefault(self._weights[name].storage, self._slab.view(name))
        super()._reserve()

    def _bound(self, name: str) -> Tensor:
        if name not in self._slab.places:
            return super()._bound(name)
        return self._view_of_host_weight(name)

    def _view_of_host_weight(self, name: str) -> Tensor:
        """What an offloaded parameter looks at while the model runs."""
        raise TypeError(f"{type(self).__name__} does not say through what {name} is read")

    def _register_hooks(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        # An asynchronous copy from memory that is not page-locked is silently synchronous.
        if self._device.residency(self._device.device_view(self._slab.memory)) != "host":
            raise ModelLoadError(f"{self._device.name} does not see the weights' host memory as page-locked")
        by_module: dict[str, dict[str, Tensor]] = {}
        for name in self._plan.offloaded:
            path, _, leaf = name.rpartition(".")
            by_module.setdefault(path, {})[leaf] = self._true(name)
        for path, own in by_module.items():
            module = model.get_submodule(path)
            self._handles.append(module.register_state_dict_post_hook(_TrueState(own)))
            self._handles.append(module.register_load_state_dict_pre_hook(_RefuseLoading()))

    def report(self) -> MemoryReport:
        report = super().report()
        if self._slab is None or (self._is_closed and not self._slab.survivors):
            return report
        return replace(report, offloaded_bytes=self._slab.offloaded_bytes, locked_bytes=self._slab.locked_bytes)

    def _survivors(self) -> tuple[str, ...]:
        kept = self._slab.survivors if self._slab is not None else ()
        return tuple(dict.fromkeys((*super()._survivors(), *kept)))

    def _release(self) -> None:
        super()._release()
        if self._slab is not None:
            self._slab.close()


class _RefuseLoading(Hook):
    """Refuses `load_state_dict`, which would write into a slot or a staging buffer and be lost."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        raise ValueError(f"cannot load a state dict into the offloaded module {prefix!r}: restore the model first")


class _TrueState(Hook):
    """Puts the weights of one module, as they are in the slab, into a state dict."""

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        self._own = own

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for leaf, tensor in self._own.items():
            state[prefix + leaf] = tensor
