"""Seeing operators: a dispatch mode that charges each one to the virtual GPU and then runs it.

The mode is per thread and is entered together with `inference_mode`, under which `linear` or attention arrive whole;
under `no_grad` alone they would arrive in pieces and be charged differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from offload.virtual.cost import DECOMPOSED, WITHOUT_WORK, work_of
from offload.virtual.operators import byte_range, flatten, indexes_by_integers, mutated, operator

if TYPE_CHECKING:
    from offload.virtual.device import VirtualDevice


class HostReadError(RuntimeError):
    """An operator needs a value on the host without asking the device for it."""


class Observer(TorchDispatchMode):
    """Charges operators of this thread to a virtual GPU, on its compute stream.

    Args:
        device: which is charged.
        may_read: an operator that needs values on the host waits for them, as on a GPU; else it is refused.
    """

    def __init__(self, device: VirtualDevice, may_read: bool = False) -> None:
        super().__init__()
        self._device = device
        self._may_read = may_read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        device = self._device
        if device.is_quiet:
            return func(*args, **kwargs)
        known = operator(func)
        if known.refused and not (known.name == "index" and indexes_by_integers(args)):
            if not self._may_read:
                raise HostReadError(f"operator {known.name!r} on {device.name}: {known.refused}")
            device.let_host_read(flatten(args), known.name)
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
            if known.name in WITHOUT_WORK or capture is not None:  # a capture writes nothing, a replay will
                device.races.blank((storage, *byte_range(tensor)))
        work = work_of(known, func, args, kwargs, made, out)
        if work is not None:
            rerun = (func, args, kwargs, made) if capture is not None else None
            device.issue_kernel(known.name, work, rerun)
        return out
