"""Seeing operators: a dispatch mode that charges each one to the virtual GPU and then runs it.

The mode is per thread and is entered together with `inference_mode`, under which `linear` or attention arrive whole;
under `no_grad` alone they would arrive in pieces and be charged differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload.device import require_memory
from offload.host import free_host_memory, map_anonymous
from offload.virtual.cost import DECOMPOSED, WITHOUT_WORK, work_of
from offload.virtual.operators import byte_range, flatten, mutated, operator

if TYPE_CHECKING:
    from offload.virtual.device import VirtualDevice


class HostReadError(RuntimeError):
    """An operator needs a value on the host without asking the device for it."""


class Observer(TorchDispatchMode):
    """Charges operators of this thread to a virtual GPU, on its compute stream."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        device = self._device
        if device.is_quiet:
            return func(*args, **kwargs)
        known = operator(func)
        if known.refused:
            raise HostReadError(f"operator {known.name!r} on {device.name}: {known.refused}")
        if known.name in DECOMPOSED:
            with self:
                return func.decompose(*args, **kwargs)
        capture = device.current_capture
        changed = mutated(known, args, kwargs) if known.mutated_names else []
        if capture is not None:
            capture.preserve(changed)
        out = device.numerics.run(func, known, args, kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in (*flatten(args), *flatten(list(kwargs.values())))}
        made = [tensor for tensor in flatten(out) if tensor.untyped_storage()._cdata not in given]
        for tensor in made:
            storage = device.account.storage_of(tensor, "activations")
            if known.name in WITHOUT_WORK:
                device.races.blank((storage, *byte_range(tensor)))
        work = work_of(known, func, args, kwargs, made, out)
        if work is not None:
            rerun = (func, args, kwargs, made) if capture is not None else None
            device.issue_kernel(known.name, work, rerun)
        return out


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

    def run(self, func: Any, known: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def again(self, func: Any, args: Any, kwargs: dict[str, Any], made: list[torch.Tensor]) -> None:
        """Run a captured operator again and put its results where the capture's went."""
        out = func(*args, **kwargs)
        if made:
            given = {tensor.untyped_storage()._cdata for tensor in (*flatten(args), *flatten(list(kwargs.values())))}
            fresh = [tensor for tensor in flatten(out) if tensor.untyped_storage()._cdata not in given]
            for target, result in zip(made, fresh, strict=True):
                target.copy_(result)
