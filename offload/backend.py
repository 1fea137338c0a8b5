"""The contract of a backend. The base class *is* "no offload": every weight is resident on the device.

A backend is made for a list of weights and a plan, before any weight is read. It reserves memory, says where each
weight goes (`destination`), binds a model's parameters to what it reserved (`attach`), and gives everything back
(`close`). A model is never told which backend runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offload.allocation import Allocation, laid_out, view
from offload.config import OffloadConfig
from offload.device import Device, Residency
from offload.errors import ModelLoadError
from offload.hooks import name_layers
from offload.plan import Plan
from offload.report import MemoryReport
from offload.weights import Weight, specs_of, weights_of

__all__ = ["Backend", "Weight", "make_backend", "specs_of", "weights_of"]


class Backend:
    """No offload: one device allocation holds every weight, each aligned to 128 bytes.

    Args:
        weights: every parameter of the model, from `weights_of`.
        plan: what is offloaded (nothing, here).
        device: where it runs.
        requested_bytes: the budget of the configuration, for the report.

    Raises:
        ModelLoadError: not enough memory; nothing stays allocated.
    """

    def __init__(self, weights: Sequence[Weight], plan: Plan, device: Device, requested_bytes: int = 0) -> None:
        self._weights = {weight.name: weight for weight in weights}
        self._plan = plan
        self._device = device
        self._requested_bytes = requested_bytes
        self._tensors: dict[int, Tensor] = {}
        self._asked: set[str] = set()
        self._model: nn.Module | None = None
        self._handles: list[RemovableHandle] = []
        self._parameters: dict[str, weakref.ref[nn.Parameter]] = {}
        self._resident: Allocation | None = None
        self._is_closed = False
        try:
            # Tensors made in inference mode could not be written outside of it, whoever runs the model later.
            with torch.inference_mode(False):
                device.require(*self._needed_bytes())
                self._reserve()
        except BaseException:
            self.close()
            raise

    # -- memory -----------------------------------------------------------------------------------------------------

    def _needed_bytes(self) -> tuple[int, int]:
        """Host and device memory that `_reserve` will ask for, so that what does not fit is refused as a whole."""
        _, device_bytes = laid_out([weight.nbytes for weight in self._resident_weights().values()])
        return 0, device_bytes

    def _reserve(self) -> None:
        """Allocate everything; a subclass places what is on the host first, and the rest is resident."""
        resident = self._resident_weights()
        offsets_bytes, nbytes = laid_out([weight.nbytes for weight in resident.values()])
        self._resident = Allocation(self._device, nbytes)
        for (storage, weight), offset in zip(resident.items(), offsets_bytes, strict=True):
            self._tensors[storage] = view(self._resident.memory, offset, weight)

    def _resident_weights(self) -> dict[int, Weight]:
        """The weights that stay on the device, by storage."""
        offloaded = {self._weights[name].storage for name in self._plan.offloaded}
        return {weight.storage: weight for weight in self._weights.values() if weight.storage not in offloaded}

    def destination(self, name: str) -> Tensor:
        """Where the loader writes weight `name`: (shape), dtype of the weight, in its final place.

        Host memory for an offloaded weight, device memory otherwise; equal for names that share a storage.

        Raises:
            ValueError: the model has no such weight, or the backend is closed.
        """
        tensor = self._true(name)
        self._asked.add(name)
        return tensor

    def _true(self, name: str) -> Tensor:
        weight = self._weights.get(name)
        if weight is None:
            raise ValueError(f"the model has no weight {name!r}: ask for a name that weights_of() lists")
        if weight.storage not in self._tensors:
            raise ValueError(f"weight {name!r} has no memory any more: the backend is closed, load the model again")
        return self._tensors[weight.storage]

    @property
    def asked(self) -> frozenset[str]:
        """Names that a loader has asked for."""
        return frozenset(self._asked)

    # -- the model --------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Bind the parameters to what was reserved, register hooks, check residency.

        The weights are in their destinations by now. Parameters are bound frozen; names of one shared parameter stay
        one `nn.Parameter`. If anything fails, the model is left with parameters on `meta` and without hooks.

        Args:
            model: the module that `weights_of` listed.
            layers: its decoder layers, by the index that the weights carry.

        Raises:
            ValueError: it is attached already.
            ModelLoadError: a weight is not where the plan wants it.
        """
        if self._model is not None:
            raise ValueError("this backend has a model already: detach() it first")
        self._model = model
        try:
            with torch.inference_mode(False):
                self._bind(model)
                self._register_hooks(model, layers)
            if self._device.simulated:
                self._handles += name_layers(layers, self._device)
            self.check_residency()
        except BaseException:
            self.detach()
            raise

    def _bind(self, model: nn.Module) -> None:
        parameters: dict[int, nn.Parameter] = {}
        for name, weight in self._weights.items():
            if weight.storage not in parameters:
                parameters[weight.storage] = nn.Parameter(self._bound(name), requires_grad=False)
            _set_parameter(model, name, parameters[weight.storage])
            self._parameters[name] = weakref.ref(parameters[weight.storage])

    def _bound(self, name: str) -> Tensor:
        """What the parameter `name` looks at while the model runs."""
        return self._true(name)

    def _register_hooks(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Register what has to happen around layers, keeping the handles in `_handles`."""

    def _planned_residency(self, name: str) -> Residency:
        return "device"

    def check_residency(self) -> None:
        """Ask the device where each parameter of the attached model really is.

        Raises:
            ModelLoadError: a parameter was replaced or moved since it was bound.
        """
        if self._model is None:
            return
        for name, weight in self._weights.items():
            if not weight.nbytes:
                continue
            planned = self._planned_residency(name)
            actual = self._device.residency(self._model.get_parameter(name))
            if actual != planned:
                raise ModelLoadError(
                    f"weight {name!r} is planned for the {planned} and is on the {actual}: "
                    "do not move or replace parameters of a loaded model"
                )

    def detach(self) -> Mapping[str, Tensor]:
        """Undo `attach` (hooks, classes) and return name -> true weight, for `restore()` and `state_dict()`.

        The model's parameters are left on `meta`, so that it holds none of this memory.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._model is not None:
            self._restore_classes(self._model)
            parameters: dict[int, nn.Parameter] = {}
            for name, weight in self._weights.items():
                if weight.storage not in parameters:
                    empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                    parameters[weight.storage] = nn.Parameter(empty, requires_grad=False)
                _set_parameter(self._model, name, parameters[weight.storage])
        self._model = None
        return {name: self._tensors[w.storage] for name, w in self._weights.items() if w.storage in self._tensors}

    def _restore_classes(self, model: nn.Module) -> None:
        """Give modules whose class was changed their own one back."""

    # -- capture ----------------------------------------------------------------------------------------------------

    def before_capture(self) -> None:
        """Make the compute stream wait for earlier copies, so that a capture may begin.

        A replay needs the same before it: eager code in between may have issued copies. It costs nothing if not.
        """

    def before_capture_ends(self) -> None:
        """Join the side stream to the compute stream."""

    def after_capture(self) -> None:
        """Make eager code safe again, also after a capture that failed: it must not wait for events of the capture."""

    # -- the end ----------------------------------------------------------------------------------------------------

    def report(self) -> MemoryReport:
        """Count what is allocated now; after `close()`, what is still alive and which weights keep it."""
        return MemoryReport(
            requested_bytes=self._requested_bytes,
            resident_bytes=self._resident.nbytes if self._resident else 0,
            survivors=self._survivors(),
        )

    def _survivors(self) -> tuple[str, ...]:
        """Weights that a living parameter shows; all resident ones where something else keeps their memory alive."""
        if not self._is_closed:
            return ()
        alive = [name for name, parameter in self._parameters.items() if parameter() is not None]
        offloaded = frozenset(self._plan.offloaded)
        resident = [name for name in self._weights if name not in offloaded]
        if self._resident is not None and self._resident.nbytes and not set(alive) & set(resident):
            alive += resident
        return tuple(alive)

    def close(self) -> None:
        """Undo everything; pages are given back when the last view dies. Idempotent."""
        if self._is_closed:
            return
        self.detach()
        # No copy and no kernel may still use what is about to be unmapped.
        self._device.synchronise()
        self._release()
        self._is_closed = True

    def _release(self) -> None:
        """Let go of all memory."""
        self._tensors.clear()
        if self._resident is not None:
            self._resident.release()


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, parameter)


def make_backend(weights: Sequence[Weight], plan: Plan, config: OffloadConfig, device: Device) -> Backend:
    """Make the backend that the configuration resolves to; the base class where nothing is offloaded.

    Args:
        weights: every parameter of the model, from `weights_of`.
        plan: made of the same weights and configuration.
        config: what the user asked for.
        device: where it runs.

    Raises:
        ModelLoadError: not enough memory; nothing stays allocated.
    """
    if plan.backend == "uva":
        from offload.uva import UvaBackend

        return UvaBackend(weights, plan, device, config.budget_bytes)
    if plan.backend == "prefetch":
        from offload.prefetch import PrefetchBackend

        return PrefetchBackend(weights, plan, device)
    return Backend(weights, plan, device)
