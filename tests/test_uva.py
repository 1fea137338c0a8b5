"""uva: matrices are read where they lie, vectors are staged once per use."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.backend import weights_of
from offload.linear import HostLinear
from tests.toys import CountingDevice, Toy, logits, offloaded, uva

pytestmark = pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")
EVERYTHING = uva(1e9)


def test_matrices_are_views_of_the_slab() -> None:
    model, device = Toy([3, 4]), CountingDevice()
    backend, planned = offloaded(model, EVERYTHING, device)
    for name in planned.offloaded:
        parameter, true = model.get_parameter(name), backend.destination(name)
        assert device.residency(true) == "host"
        if parameter.dim() == 2:
            assert parameter.data_ptr() == true.data_ptr() and parameter.shape == true.shape
        else:
            assert device.residency(parameter) == "device"


def test_vectors_are_staged_by_one_copy_per_layer_and_pass() -> None:
    model, device = Toy([3, 4, 5]), CountingDevice()
    backend, _ = offloaded(model, EVERYTHING, device)
    assert device.copies == 0
    for passes in (1, 2, 3):
        logits(model)
        assert device.copies == 3 * passes
    # norm weight and bias, up.bias, gain: four lines of 128 bytes, one buffer for all layers.
    assert backend.report().staging_bytes == 4 * 128
    assert model.layers[0].norm.weight.data_ptr() == model.layers[2].norm.weight.data_ptr()


def test_a_layer_without_host_vectors_copies_nothing() -> None:
    model, device = Toy([3, 4]), CountingDevice()
    config = {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["down"]}}
    backend, planned = offloaded(model, config, device)
    logits(model)
    assert len(planned.offloaded) == 2 and device.copies == 0 and backend.report().staging_bytes == 0


@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    budget_bytes=st.integers(1, 6000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=40)
def test_any_budget_gives_the_plain_model(widths: list[int], budget_bytes: int, dtype: torch.dtype) -> None:
    model, plain, device = Toy(widths).to(dtype), Toy(widths).to(dtype), CountingDevice()
    backend, planned = offloaded(model, uva(budget_bytes), device)
    for _ in range(3):
        assert torch.equal(logits(model), logits(plain))
    assert backend.report().offloaded_bytes == planned.offloaded_bytes > 0
    backend.close()


def test_a_weight_that_layers_share_is_right_in_each() -> None:
    def shared() -> Toy:
        model = Toy([4, 4, 4])
        model.layers[2].down.weight = model.layers[0].down.weight
        model.layers[1].norm = model.layers[0].norm
        model.layers[2].up.bias = model.layers[0].up.bias
        return model

    model, plain, device = shared(), shared(), CountingDevice()
    backend, planned = offloaded(model, EVERYTHING, device)
    for _ in range(2):
        assert torch.equal(logits(model), logits(plain))
    assert model.layers[2].down.weight is model.layers[0].down.weight
    assert "layers.1.norm.weight" in planned.offloaded
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_only_plain_linear_layers_change_their_class_and_change_back() -> None:
    class Custom(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    def made() -> Toy:
        model = Toy([3, 4])
        model.layers[1].up = Custom(7, 4)
        torch.manual_seed(1)
        nn.init.normal_(model.layers[1].up.weight)
        nn.init.normal_(model.layers[1].up.bias)
        return model

    model = made()
    backend, _ = offloaded(model, EVERYTHING)
    assert type(model.layers[0].up) is HostLinear and type(model.head) is nn.Linear
    assert type(model.layers[1].up) is Custom
    assert torch.equal(logits(model), logits(made()))
    backend.detach()
    assert type(model.layers[0].up) is nn.Linear


def test_a_dtype_that_the_kernels_do_not_take_works_on_the_view() -> None:
    model, plain = Toy([3, 4]).double(), Toy([3, 4]).double()
    offloaded(model, EVERYTHING)
    assert type(model.layers[0].up) is nn.Linear
    assert torch.equal(logits(model), logits(plain))


def test_autocast_converts_a_host_weight_as_any_other() -> None:
    model, plain = Toy([3, 4]), Toy([3, 4])
    offloaded(model, EVERYTHING)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(model), logits(plain))


def test_true_state_and_the_refusals_of_a_copy() -> None:
    model, plain = Toy([3, 4, 5]), Toy([3, 4, 5])
    offloaded(model, EVERYTHING)
    logits(model)
    state = model.layers[0].state_dict(prefix="a.")
    assert torch.equal(state["a.norm.weight"], plain.layers[0].norm.weight)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    for refused in (copy.deepcopy, pickle.dumps):
        for target in (model, model.layers[1], model.layers[1].up):
            with pytest.raises(ValueError, match="offloaded model cannot be copied"):
                refused(target)
    with pytest.raises(ValueError, match=r"cannot load a state dict into the offloaded module 'layers\.0\.'"):
        model.load_state_dict(plain.state_dict())


def test_staging_comes_before_the_users_hooks_and_survives_an_exception() -> None:
    model, plain, order = Toy([3, 4]), Toy([3, 4]), []
    model.layers[1].register_forward_pre_hook(lambda module, args: order.append(module.norm.weight.clone()))
    with torch.no_grad():
        for toy in (model, plain):
            toy.layers[1].norm.weight.mul_(3)
    offloaded(model, EVERYTHING)
    handle = model.layers[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model)
    handle.remove()
    assert torch.equal(order[0], plain.layers[1].norm.weight)
    assert torch.equal(logits(model), logits(plain))


def test_every_listed_weight_has_its_planned_residency() -> None:
    model, device = Toy([3, 4]), CountingDevice()
    _, planned = offloaded(model, uva(200), device)
    on_host = {
        weight.name
        for weight in weights_of(model, model.layers)
        if weight.nbytes and device.residency(model.get_parameter(weight.name)) == "host"
    }
    assert on_host == {name for name in planned.offloaded if model.get_parameter(name).dim() == 2} != set()
