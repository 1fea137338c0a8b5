"""Linear layers of our own models: the quick way for one bf16 row, and the twin with the same bits on the host."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from offload.linear import HostLinear, HostModelLinear, Linear, read_in_place, restore_class

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def layer(cls, dtype, bias):
    torch.manual_seed(1)
    made = cls(67, 45, bias, dtype=dtype)
    made.requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_()
    return made


class Operators(TorchDispatchMode):
    """Names of the operators that were called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(67,), (1, 67), (1, 1, 67), (2, 67), (0, 67)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_host_weight_gives_the_same_bits_and_torchs_accuracy(dtype, shape, bias):
    ours = layer(Linear, dtype, bias)
    x = torch.randn(shape, dtype=dtype)
    resident = ours(x)
    exact = functional.linear(x.double(), ours.weight.double(), ours.bias.double() if bias else None)
    torchs = (functional.linear(x, ours.weight, ours.bias).double() - exact).norm()
    assert resident.shape == exact.shape and resident.dtype is dtype
    assert (resident.double() - exact).norm() <= 2 * torchs + 1e-7 * exact.norm()
    assert read_in_place(ours) and type(ours) is HostModelLinear
    assert torch.equal(ours(x), resident)
    restore_class(ours)
    assert type(ours) is Linear


def test_only_one_row_of_bf16_is_a_matrix_vector_product(monkeypatch):
    called = []
    plain = torch.mv
    monkeypatch.setattr(torch, "mv", lambda weight, row: called.append(row.dtype) or plain(weight, row))
    for dtype in DTYPES:
        for rows in (1, 2):
            layer(Linear, dtype, False)(torch.randn(rows, 67, dtype=dtype))
    assert called == [torch.bfloat16]


def test_who_watches_operators_sees_one_product():
    ours = layer(Linear, torch.bfloat16, True)
    x = torch.randn(1, 67, dtype=torch.bfloat16)
    with torch.inference_mode(), Operators() as seen:
        ours(x)
        read_in_place(ours)
        ours(x)
    assert seen.names == ["aten::linear", "offload::linear"]


def test_other_linears_keep_their_own_forward():
    class Own(nn.Linear):
        pass

    plain, own, whole = nn.Linear(3, 3), Own(3, 3), nn.Linear(3, 3, dtype=torch.float64)
    assert read_in_place(plain) and type(plain) is HostLinear
    assert not read_in_place(own) and type(own) is Own
    assert not read_in_place(whole) and type(whole) is nn.Linear
    for module, cls in ((plain, nn.Linear), (own, Own), (whole, nn.Linear)):
        restore_class(module)
        assert type(module) is cls
