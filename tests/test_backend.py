"""The contract of a backend, and its base: every weight resident in one device allocation."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.backend import Backend, make_backend, specs_of, weights_of
from offload.config import OffloadConfig
from offload.cpu import CpuDevice
from offload.device import FreeMemory
from offload.errors import ModelLoadError, NotEnoughMemoryError
from offload.linear import HostLinear
from offload.plan import Plan, aligned, plan
from offload.prefetch import PrefetchBackend
from offload.uva import UvaBackend
from tests.toys import Toy, logits, offloaded, prefetch, prepared, uva

pytestmark = pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")

CONFIGS = {
    "none": None,
    "uva": uva(1e9),
    "uva-part": uva(600),
    "prefetch": prefetch(2),
    "prefetch-ring": prefetch(1, 1, 2),
}
EVERY = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
OFFLOADING = pytest.mark.parametrize("config", list(CONFIGS.values())[1:], ids=list(CONFIGS)[1:])


class _StarvedDevice(CpuDevice):
    """Fails at the n-th device allocation, and remembers everything that was allocated before."""

    def __init__(self, fail_at: int, error: BaseException) -> None:
        super().__init__()
        self.left, self.error = fail_at, error
        self.allocated: list[StorageWeakRef] = []

    def _map(self, nbytes: int) -> torch.Tensor:
        if self.left == 0:
            raise self.error
        self.left -= 1
        tensor = super()._map(nbytes)
        self.allocated.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor


# -- the list of weights ------------------------------------------------------------------------------------------


def test_weights_are_listed_in_declaration_order_with_their_layers() -> None:
    model = Toy([3, 4])
    weights = weights_of(model, model.layers)
    assert [w.name for w in weights] == [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert {w.layer for w in weights if w.name.startswith("layers.1.")} == {1}
    assert {w.layer for w in weights if not w.name.startswith("layers.")} == {None}
    by_name = {w.name: w for w in weights}
    assert by_name["embed.weight"].storage == by_name["head.weight"].storage
    assert by_name["layers.1.down.weight"].shape == (7, 4) and by_name["layers.1.down.weight"].nbytes == 112


def test_a_module_in_two_layers_is_listed_in_both() -> None:
    model = Toy([3, 3, 3])
    model.layers[2].norm = model.layers[0].norm
    found = {w.name: (w.layer, w.storage) for w in weights_of(model, model.layers)}
    assert found["layers.0.norm.weight"] == (0, id(model.layers[0].norm.weight))
    assert found["layers.2.norm.weight"] == (2, id(model.layers[0].norm.weight))


def test_a_layer_that_stands_twice_has_both_indices() -> None:
    model = Toy([3])
    model.layers.append(model.layers[0])
    weights = weights_of(model, model.layers)
    assert [w.layer for w in weights if w.name.endswith("up.weight")] == [0, 1]
    # Under prefetch such a weight is two layers' weight and stays; a list with one index would give it one slot.
    assert not plan(specs_of(weights), OffloadConfig.of(prefetch())).offloaded


# -- no offload -----------------------------------------------------------------------------------------------------


def test_everything_is_resident_in_one_aligned_allocation() -> None:
    model = Toy([3, 4])
    backend, _ = prepared(model, None)
    tensors = {w.storage: backend.destination(w.name) for w in weights_of(model, model.layers)}
    assert len({t.untyped_storage().data_ptr() for t in tensors.values() if t.numel()}) == 1
    assert all(t.data_ptr() % 128 == 0 for t in tensors.values() if t.numel())
    assert backend.report().resident_bytes == sum(aligned(t.nbytes) for t in tensors.values())
    assert backend.destination("embed.weight") is backend.destination("head.weight")


def test_what_a_loader_asked_for_is_known() -> None:
    model = Toy([3])
    weights = weights_of(model, model.layers)
    backend = Backend(weights, Plan(), CpuDevice())
    assert backend.asked == frozenset()
    backend.destination("head.bias")
    assert backend.asked == {"head.bias"}
    with pytest.raises(ValueError, match=r"no weight 'head\.biass'"):
        backend.destination("head.biass")


def test_the_configuration_chooses() -> None:
    def made(config: object) -> type:
        model = Toy([3, 3])
        weights, chosen = weights_of(model, model.layers), OffloadConfig.of(config)
        return type(make_backend(weights, plan(specs_of(weights), chosen), chosen, CpuDevice()))

    assert [made(c) for c in (None, uva(99), prefetch())] == [Backend, UvaBackend, PrefetchBackend]


# -- every backend ----------------------------------------------------------------------------------------------------


@EVERY
def test_outputs_and_state_are_those_of_the_plain_model(config: object) -> None:
    model, plain = Toy([3, 4, 5, 6]), Toy([3, 4, 5, 6])
    backend, _ = offloaded(model, config)
    for _ in range(3):
        assert torch.equal(logits(model), logits(plain))
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    backend.close()


@EVERY
def test_parameters_are_frozen_and_shared_ones_stay_one(config: object) -> None:
    model = Toy([3, 4])
    offloaded(model, config)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.head.weight is model.embed.weight


@EVERY
def test_close_gives_everything_back(config: object) -> None:
    model = Toy([3, 4, 5])
    device = _StarvedDevice(99, MemoryError())
    backend, _ = offloaded(model, config, device)
    logits(model)
    assert device.allocated and not any(ref.expired() for ref in device.allocated)
    backend.close()
    backend.close()
    assert all(ref.expired() for ref in device.allocated)
    report = backend.report()
    assert (report.device_bytes, report.locked_bytes, report.offloaded_bytes, report.survivors) == (0, 0, 0, ())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert type(model.layers[0].up) is nn.Linear
    with pytest.raises(ValueError, match="closed"):
        backend.destination("embed.weight")


@EVERY
def test_close_waits_for_the_device_before_it_lets_go(config: object) -> None:
    class Waiting(_StarvedDevice):
        def synchronise(self) -> None:
            self.alive = [not ref.expired() for ref in self.allocated]

    device = Waiting(99, MemoryError())
    backend, _ = offloaded(Toy([3, 4, 5]), config, device)
    device.alive = []
    backend.close()
    assert device.alive and all(device.alive)


@EVERY
def test_without_close_memory_goes_with_the_last_reference(config: object) -> None:
    model = Toy([3, 4, 5])
    device = _StarvedDevice(99, MemoryError())
    backend, _ = offloaded(model, config, device)
    gc.disable()
    try:
        del backend, model
        assert all(ref.expired() for ref in device.allocated)
    finally:
        gc.enable()


@EVERY
def test_survivors_are_named(config: object) -> None:
    model = Toy([3, 4])
    backend, planned = offloaded(model, config)
    kept = model.layers[1].down.weight
    backend.close()
    report = backend.report()
    assert report.survivors == ("layers.1.down.weight",)
    assert (report.device_bytes > 0) or (report.locked_bytes > 0)
    del kept
    assert backend.report().survivors == ()


def test_survivors_are_every_resident_weight_if_only_a_bare_view_is_left() -> None:
    model = Toy([3])
    backend, _ = offloaded(model, None)
    with torch.inference_mode():
        kept = backend.destination("head.bias")[:1].view(torch.uint8)
    backend.close()
    assert set(backend.report().survivors) == {w.name for w in weights_of(model, model.layers)}
    del kept


class _Ledger(CpuDevice):
    """Notes what it is asked for: first as a whole, then piece by piece; and may have less memory than it has."""

    def __init__(self, free_bytes: int = 2**40) -> None:
        super().__init__()
        self.free_bytes = free_bytes
        self.required: list[tuple[int, int]] = []
        self.allocated = {"host": 0, "device": 0}

    def host_memory(self) -> FreeMemory:
        return FreeMemory(self.free_bytes, 2**40)

    def require(self, host_bytes: int = 0, device_bytes: int = 0) -> None:
        if not any(self.allocated.values()):
            self.required.append((host_bytes, device_bytes))
        super().require(host_bytes, device_bytes)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        tensor = super().allocate_host(nbytes)
        self.allocated["host"] += nbytes
        return tensor

    def allocate_device(self, nbytes: int) -> torch.Tensor:
        tensor = super().allocate_device(nbytes)
        self.allocated["device"] += nbytes
        return tensor


def _shared() -> Toy:
    model = Toy([3, 4, 5, 6])
    model.layers[2].norm = model.layers[0].norm
    model.layers[3].up.bias = nn.Parameter(torch.randn(6))
    model.layers[1].gain = model.layers[3].gain
    return model


@EVERY
def test_memory_is_asked_for_as_a_whole_before_any_is_reserved(config: object) -> None:
    device = _Ledger()
    backend, _ = offloaded(_shared(), config, device)
    host_bytes, device_bytes = device.allocated["host"], device.allocated["device"]
    assert device.required[0] == (host_bytes, device_bytes)
    assert backend.report().device_bytes == device_bytes
    offloaded(_shared(), config, _Ledger(host_bytes + device_bytes))
    starved = _Ledger(host_bytes + device_bytes - 1)
    with pytest.raises(NotEnoughMemoryError, match=r"not enough memory on the host: needs .* has .*; use a smaller"):
        offloaded(_shared(), config, starved)
    assert not any(starved.allocated.values())


@EVERY
@pytest.mark.parametrize("error", [ModelLoadError("full"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_a_failed_reservation_leaves_nothing(config: object, error: BaseException) -> None:
    allocations = _StarvedDevice(99, error)
    offloaded(Toy([3, 4, 5]), config, allocations)
    for fail_at in range(len(allocations.allocated)):
        device = _StarvedDevice(fail_at, error)
        with pytest.raises(type(error)):
            offloaded(Toy([3, 4, 5]), config, device)
        assert all(ref.expired() for ref in device.allocated)


class _Interrupting(nn.Module):
    """Lets `attach` fail, once, when it reaches this module."""

    armed = False

    def __setattr__(self, name: str, value: object) -> None:
        if self.armed and name != "armed":
            self.armed = False
            raise KeyboardInterrupt
        super().__setattr__(name, value)


@EVERY
def test_a_failed_attach_leaves_a_plain_model(config: object) -> None:
    model = Toy([3, 4, 5])
    model.last = _Interrupting()
    model.last.weight = nn.Parameter(torch.ones(2))
    backend, _ = prepared(model, config)
    model.last.armed = True
    with pytest.raises(KeyboardInterrupt):
        backend.attach(model, model.layers)
    assert not any(m._forward_pre_hooks or m._forward_hooks or m._state_dict_hooks for m in model.modules())
    assert not any(isinstance(m, HostLinear) for m in model.modules())
    backend.attach(model, model.layers)
    plain = Toy([3, 4, 5])
    assert torch.equal(logits(model), logits(plain))


@EVERY
def test_attach_again_after_detach_reads_the_weights_anew(config: object) -> None:
    model, plain = Toy([3, 4, 5]), Toy([3, 4, 5])
    backend, _ = offloaded(model, config)
    weights = backend.detach()
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        for tensor in {id(t): t for t in weights.values()}.values():
            tensor.mul_(2)
        for parameter in plain.parameters():
            parameter.mul_(2)
    backend.attach(model, model.layers)
    assert torch.equal(logits(model), logits(plain))
    with pytest.raises(ValueError, match="has a model already"):
        backend.attach(model, model.layers)


@EVERY
def test_a_model_made_in_inference_mode_runs_outside_of_it(config: object) -> None:
    with torch.inference_mode():
        model = Toy([3, 4, 5])
        backend, _ = offloaded(model, config)
    with torch.no_grad():
        for _ in range(2):
            result = model(torch.tensor([[1]]))
    assert torch.equal(result, Toy([3, 4, 5])(torch.tensor([[1]])))


@OFFLOADING
def test_a_replaced_parameter_is_noticed(config: object) -> None:
    model = Toy([3, 4, 5])
    backend, planned = offloaded(model, config)
    backend.check_residency()
    if planned.backend == "uva":
        name = "layers.0.up.weight"
        model.layers[0].up.weight = nn.Parameter(model.layers[0].up.weight.clone(), requires_grad=False)
        with pytest.raises(ModelLoadError, match=f"{name!r} is planned for the host and is on the device"):
            backend.check_residency()
    else:
        model.embed.weight = nn.Parameter(backend.destination("layers.1.up.weight"), requires_grad=False)
        with pytest.raises(ModelLoadError, match="'embed.weight' is planned for the device and is on the host"):
            backend.check_residency()


class _ReturningDevice(CpuDevice):
    """Gives weights back to the device without a word, as `.contiguous()` on a view does."""

    def device_view(self, host: torch.Tensor) -> torch.Tensor:
        return host if host.dtype == torch.uint8 else host.clone()


def test_a_weight_that_is_not_where_it_should_be_is_noticed_at_once() -> None:
    model = Toy([3])
    with pytest.raises(ModelLoadError, match=r"'layers\.0\.up\.weight' is planned for the host and is on the device"):
        offloaded(model, uva(1e9), _ReturningDevice())
    assert all(parameter.is_meta for parameter in model.parameters())


class _PageableDevice(CpuDevice):
    """Gives host memory whose pages are not locked."""

    def residency(self, tensor: torch.Tensor) -> str:
        return "device"


@OFFLOADING
def test_host_memory_that_is_not_locked_is_refused(config: object) -> None:
    with pytest.raises(ModelLoadError, match="cpu does not see the weights' host memory as page-locked"):
        offloaded(Toy([3, 4, 5]), config, _PageableDevice())


def test_the_plain_model_can_be_copied() -> None:
    model = Toy([3, 4])
    offloaded(model, None)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
