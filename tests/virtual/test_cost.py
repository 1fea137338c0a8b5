"""What an operator is charged: bytes by where they live, FLOPs, and nothing for a view."""

import pytest
import torch
import torch.nn.functional as F

from offload.virtual import VirtualDevice
from offload.virtual.observe import HostReadError
from offload_kernels import fused_experts, linear

KIB = 1024


@pytest.fixture(params=["cpu", "meta"])
def device(request, toy):
    return VirtualDevice(toy(), request.param)


def on_device(device, *shape, dtype=torch.bfloat16):
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return device.allocate_device(nbytes).zero_().view(dtype).view(shape)


def on_host(device, *shape, dtype=torch.bfloat16):
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return device.device_view(device.allocate_host(nbytes).zero_().view(dtype).view(shape))


def charged(device, function):
    """Demands of the operators that a function issues: a list of (name, demands without zeros)."""
    log = device.issuer.simulator.log
    before = len(log[0]) if log else 0
    with device.active():
        function()
    entries = device.issuer.simulator.log[0][before:] if device.issuer.simulator.log else []
    return [(entry.name, {name: amount for name, amount in entry.demands.items() if amount}) for entry in entries]


def test_a_linear_reads_its_weight_and_writes_its_result(device):
    x, w, b = on_device(device, 4, 64), on_device(device, 32, 64), on_device(device, 32)
    nbytes = 2 * (4 * 64 + 32 * 64 + 32 + 4 * 32)
    assert charged(device, lambda: F.linear(x, w, b)) == [("linear", {"hbm": nbytes, "flops": 2 * 4 * 64 * 32})]


def test_the_same_charge_whatever_grad_mode_the_caller_is_in(device):
    x, w = on_device(device, 4, 64), on_device(device, 32, 64)
    g = on_device(device, 32)
    q = on_device(device, 1, 2, 3, 8)

    def block():
        F.rms_norm(F.linear(x, w), (32,), g)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)

    whole = charged(device, block)
    assert [name for name, _ in whole] == ["linear", "rms_norm", "scaled_dot_product_attention"]

    def without_grad():
        with torch.no_grad():
            block()

    assert charged(device, without_grad) == whole
    with torch.no_grad():
        assert charged(device, block) == whole


def test_an_ordinary_product_reads_a_host_weight_once_per_block_of_rows(device):
    w = on_host(device, 32, 64)
    for rows, passes in ((1, 1), (128, 1), (129, 2)):
        x = on_device(device, rows, 64)
        [(_, demands)] = charged(device, lambda x=x: F.linear(x, w))
        assert demands["sm"] == passes * 2 * 32 * 64


@pytest.mark.parametrize("rows", [1, 257])
def test_our_linear_reads_a_host_weight_once(device, rows):
    w, x = on_host(device, 32, 64), on_device(device, rows, 64)
    [(name, demands)] = charged(device, lambda: linear(x, w))
    staged = 0 if rows <= 256 else 2 * 2 * 32 * 64
    assert name == "offload::linear"
    expected = {"sm": 2 * 32 * 64, "hbm": 2 * rows * (64 + 32) + staged, "flops": 2 * rows * 64 * 32}
    assert demands == expected


def test_a_staged_linear_takes_the_copy_engine(device):
    w, x = on_host(device, 32, 64), on_device(device, 8, 64)
    [(_, demands)] = charged(device, lambda: linear(x, w, schedule="staged"))
    assert demands["ce"] == 2 * 32 * 64 and "sm" not in demands


def test_only_routed_experts_cross_the_bus():
    device = VirtualDevice("h200-pcie5")
    experts, hidden, inner = 8, 16, 32
    w13, w2 = on_host(device, experts, 2 * inner, hidden), on_host(device, experts, hidden, inner)
    x = on_device(device, 3, hidden)
    ids, weights = device.from_host([[1, 2], [2, 1], [1, 5]]), on_device(device, 3, 2)
    [(name, demands)] = charged(device, lambda: fused_experts(x, w13, w2, ids, weights))
    assert name == "offload::fused_experts"
    assert demands["sm"] == 3 * 3 * inner * hidden * 2
    assert demands["flops"] == 2 * 6 * 3 * inner * hidden


def test_on_meta_routing_is_taken_to_be_even():
    device = VirtualDevice("h200-pcie5", "meta")
    w13, w2 = on_host(device, 128, 64, 16), on_host(device, 128, 16, 32)
    for tokens, active in ((1, 8), (16, 82), (4096, 128)):
        x, weights = on_device(device, tokens, 16), on_device(device, tokens, 8)
        ids = device.from_host([[0] * 8] * tokens)
        [(_, demands)] = charged(device, lambda x=x, ids=ids, weights=weights: fused_experts(x, w13, w2, ids, weights))
        assert demands["sm"] == active * 3 * 32 * 16 * 2


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(8, 8),
        lambda x: x.reshape(8, 8),
        lambda x: x.transpose(0, 1),
        lambda x: x.chunk(2, -1),
        lambda x: x[1:],
        lambda x: x.contiguous(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.expand(3, 4, 16),
        lambda x: torch.empty_like(x),
    ],
    ids=["view", "reshape", "transpose", "chunk", "slice", "contiguous", "to", "expand", "empty"],
)
def test_views_and_empty_memory_are_free(device, view):
    x = on_device(device, 4, 16)
    before = device.issuer.host_ps
    assert charged(device, lambda: view(x)) == []
    assert device.issuer.host_ps == before


def test_bytes_of_partial_reads_and_writes(device):
    table, cache = on_device(device, 1000, 16), on_device(device, 100, 16)
    ids, new = device.from_host([3, 5]), on_device(device, 2, 16)
    rows = 2 * 2 * 16
    assert charged(device, lambda: F.embedding(ids, table)) == [("embedding", {"hbm": rows + 16 + rows})]
    assert charged(device, lambda: cache.index_copy_(0, ids, new)) == [("index_copy_", {"hbm": rows + 16 + rows})]
    assert charged(device, lambda: cache[4:6].copy_(new)) == [("copy_", {"hbm": 2 * rows})]
    assert charged(device, lambda: cache[4:6].fill_(0)) == [("fill_", {"hbm": rows})]
    assert charged(device, lambda: cache[4:6].add_(1)) == [("add_", {"hbm": 2 * rows})]
    wide = table[:1].expand(100, 16)
    assert charged(device, lambda: wide + cache) == [("add", {"hbm": 32 + 2 * 3200})]


def test_attention_counts_what_a_causal_kernel_does(device):
    query, key = on_device(device, 2, 4, 8, 16), on_device(device, 2, 2, 8, 16)
    options = {"is_causal": True, "enable_gqa": True}
    [(_, demands)] = charged(device, lambda: F.scaled_dot_product_attention(query, key, key, **options))
    pairs = 8 * 9 // 2
    assert demands["flops"] == 2 * 2 * 4 * pairs * 32
    one = on_device(device, 2, 4, 1, 16)
    [(_, demands)] = charged(device, lambda: F.scaled_dot_product_attention(one, key, key, enable_gqa=True))
    assert demands["flops"] == 2 * 2 * 4 * 8 * 32


def test_products_in_single_precision_take_longer(toy):
    device = VirtualDevice(toy(single_flops_per_s=10**12 // 4))
    x, w = on_device(device, 4, 64, dtype=torch.float32), on_device(device, 32, 64, dtype=torch.float32)
    [(_, demands)] = charged(device, lambda: x @ w.T)
    assert demands["flops"] == 4 * 2 * 4 * 64 * 32


def test_products_under_other_names(device):
    x, w = on_device(device, 4, 64), on_device(device, 64, 32)
    b = on_device(device, 32)
    flops = 2 * 4 * 64 * 32
    for product in (
        lambda: torch.mm(x, w),
        lambda: x @ w,
        lambda: torch.addmm(b, x, w),
        lambda: torch.bmm(x[None], w[None]),
    ):
        [(_, demands)] = charged(device, product)
        assert demands["flops"] == flops


def test_a_matrix_times_a_vector(device):
    matrix, vector, bias = on_device(device, 32, 64), on_device(device, 64), on_device(device, 32)
    for product in (lambda: torch.mv(matrix, vector), lambda: torch.addmv(bias, matrix, vector)):
        [(_, demands)] = charged(device, product)
        assert demands["flops"] == 2 * 32 * 64
        assert 2 * (32 * 64 + 64 + 32) <= demands["hbm"] <= 2 * (32 * 64 + 64 + 64)


def test_products_inside_other_operators(device):
    x, w = on_device(device, 1, 4, 64), on_device(device, 64, 32)
    for product in (lambda: torch.einsum("bij,jk->bik", x, w), lambda: torch.tensordot(x, w, 1)):
        assert sum(demands.get("flops", 0) for _, demands in charged(device, product)) == 2 * 4 * 64 * 32
    image, kernel = on_device(device, 1, 2, 8, 8), on_device(device, 3, 2, 3, 3)
    flops = [demands["flops"] for _, demands in charged(device, lambda: F.conv2d(image, kernel))]
    assert flops == [2 * 3 * 6 * 6 * 2 * 3 * 3]


def test_a_value_that_only_the_host_may_ask_for(device):
    x = on_device(device, 4)
    for ask in (lambda: x[0].item(), lambda: x.nonzero(), lambda: bool(x[0] > 0), lambda: x[x > 0]):
        with pytest.raises(HostReadError, match="Device.to_host"):
            charged(device, ask)


def test_an_index_of_integers_has_a_known_size(device):
    table, ids = on_device(device, 1000, 16), device.from_host([3, 5])
    [(name, _)] = charged(device, lambda: table[ids])
    assert name == "index"


def test_a_foreign_model_waits_for_the_values_that_it_asks_for(toy):
    device = VirtualDevice(toy())
    x = on_device(device, 4)
    with device.active(foreign=True):
        x.fill_(1)
        before = device.issuer.host_ps
        assert x[0].item() == 1 and x[x > 0].numel() == 4
    assert device.issuer.host_ps >= before + 2 * device.profile.copy_ps


@pytest.mark.parametrize("product", [F.linear, linear], ids=["torch", "ours"])
def test_one_row_of_bf16_is_multiplied_as_on_a_cpu(toy, monkeypatch, product):
    device, called = VirtualDevice(toy()), []
    plain = torch.mv
    monkeypatch.setattr(torch, "mv", lambda weight, row: called.append(row.dtype) or plain(weight, row))
    x, two, w = on_device(device, 1, 1, 64), on_device(device, 2, 64), on_device(device, 32, 64)
    x.fill_(1), w.fill_(1)
    made = []
    assert [name for name, _ in charged(device, lambda: product(two, w))] != ["mv"] and not called
    [(name, _)] = charged(device, lambda: made.append(product(x, w)))
    assert name.endswith("linear") and called == [torch.bfloat16]
    with device.active():
        graph = device.capture(lambda: made.append(product(x, w)))
        graph.replay()
        assert device.to_host(made[1]) == device.to_host(made[0]) == [[[64.0] * 32]]
    assert called == [torch.bfloat16] * 3


def test_a_nested_activation_charges_once(device):
    x = on_device(device, 4)

    def nested():
        with device.active():
            x + 1

    assert len(charged(device, nested)) == 1
