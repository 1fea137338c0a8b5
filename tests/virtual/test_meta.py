"""What is remembered of an operator on `meta` is exactly what it would have returned."""

import pytest
import torch
import torch.nn.functional as F

from offload.virtual import VirtualDevice


@pytest.fixture
def device():
    return VirtualDevice("h200-pcie5", "meta")


CALLS = {
    "int": lambda x: x + 1,
    "float": lambda x: x + 1.0,
    "bool": lambda x: x + True,
    "two results": lambda x: x.topk(2, -1),
    "a list": lambda x: torch.split_with_sizes_copy(x, [1, 3], -1),
    "strides": lambda x: x.transpose(0, 1) + 1,
    "dtype": lambda x: x.to(torch.float32),
    "linear": lambda x: F.linear(x.float(), x.float()),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.float().view(1, 1, 4, 4).transpose(1, 2)] * 3),
}


@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
def test_every_call_returns_what_it_returns_without_memory(device, order):
    plain = VirtualDevice("h200-pcie5", "meta")
    plain.numerics.remember = False

    def results(one):
        with one.active():
            x = one.from_host([[1, 2, 3, 4]] * 4)
            found = {}
            for _ in range(2):
                for name in list(CALLS)[::order]:
                    out = CALLS[name](x)
                    outs = [out] if isinstance(out, torch.Tensor) else list(out)
                    found[name] = [(t.shape, t.stride(), t.dtype, t.device) for t in outs]
            return found

    assert results(device) == results(plain)
    assert results(VirtualDevice("h200-pcie5")).keys() == CALLS.keys()


def test_a_view_is_a_view_every_time(device):
    with device.active():
        x = device.allocate_device(64).view(torch.float32)
        for _ in range(2):
            part = x.view(4, 4)[1:]
            assert part.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert part.storage_offset() == 4
        assert x.add_(1) is x
        fresh = x + 1
        assert fresh.untyped_storage()._cdata != (x + 1).untyped_storage()._cdata


def test_tokens_are_zeros(device):
    with device.active():
        assert device.to_host(device.from_host([[3, 4]]) + 1) == [[0, 0]]
