"""The experts and the probe on a GPU: weights on the host, routing on the device, whole calls in a graph.

Memory errors are found by running this file under `compute-sanitizer --tool memcheck`, races under `--tool racecheck`.
"""

from dataclasses import replace

import pytest
import torch

from offload_kernels import check_routing, device_view, fused_experts, grouped_linear, link, page_lock, probe
from tests.kernels import yardstick
from tests.kernels.experts_reference import Layer, assert_accurate, random_layer

pytestmark = pytest.mark.gpu

SHAPES = {  # T, E, H, I, k
    "decode": (1, 64, 2048, 768, 8),
    "batch": (16, 32, 1024, 512, 4),
    "tile": (64, 16, 1024, 384, 4),
    "ring": (300, 8, 1024, 384, 4),
    "ragged": (75, 5, 259, 131, 3),
    "one-expert": (200, 1, 512, 256, 1),
}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what `torch.empty` returns with NaN, the scratch of the kernels included."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def host_layer(*shape, dtype=torch.bfloat16) -> Layer:
    """Weights in pinned host memory, all else on the GPU."""
    layer = random_layer(*shape, dtype)
    x, ids, weights = (each.cuda() for each in (layer.x, layer.topk_ids, layer.topk_weights))
    return Layer(x, layer.w13.pin_memory(), layer.w2.pin_memory(), ids, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_accuracy_and_bits(shape, dtype):
    layer = host_layer(*shape, dtype=dtype)
    y = fused_experts(*layer.arguments())
    assert_accurate(y, layer)
    assert torch.equal(fused_experts(*layer.arguments()), y)


@pytest.mark.parametrize("T", [3, 100])
def test_views_and_resident_weights_give_the_same_bits(T):
    layer = random_layer(T, 8, 512, 256, 2, torch.bfloat16)
    x, ids, weights = (each.cuda() for each in (layer.x, layer.topk_ids, layer.topk_weights))
    resident = fused_experts(x, layer.w13.cuda(), layer.w2.cuda(), ids, weights)
    with page_lock(layer.w13), page_lock(layer.w2):
        views = device_view(layer.w13, "cuda"), device_view(layer.w2, "cuda")
        assert torch.equal(fused_experts(x, *views, ids, weights), resident)
        torch.cuda.synchronize()


@pytest.mark.parametrize("T", [3, 100])
def test_pairs_out_of_range_add_nothing(T):
    layer = host_layer(T, 8, 512, 256, 2)
    layer.topk_ids[1] = torch.tensor([-1, 8])
    y = fused_experts(*layer.arguments())
    assert not y[1].any()
    assert_accurate(y, layer)
    with pytest.raises(ValueError, match=rf"2 of {2 * T} expert ids"):
        check_routing(layer.topk_ids, 8)


@pytest.mark.parametrize("T", [4, 100])
def test_a_graph_replays_another_routing(T):
    layer, other = host_layer(T, 16, 512, 256, 2), host_layer(T, 16, 512, 256, 2)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fused_experts(*layer.arguments())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fused_experts(*layer.arguments())
    for data in (layer, other):
        layer.x.copy_(data.x)
        layer.topk_ids.copy_(data.topk_ids)
        layer.topk_weights.copy_(data.topk_weights)
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_accurate(y, replace(layer))


def test_grouped_linear():
    x, weight = torch.randn(300, 512, device="cuda").bfloat16(), torch.randn(4, 256, 512).bfloat16().pin_memory()
    ends = [0, 5, 5, 230, 280]
    y = grouped_linear(x, weight, torch.tensor(ends, device="cuda"))
    for group, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
        if first < last:
            yardstick.assert_accurate(y[first:last], x[first:last], weight[group].cuda())
    assert not y[280:].any()


def test_a_pageable_weight_is_refused():
    layer = host_layer(3, 4, 64, 32, 2)
    with pytest.raises(ValueError, match="pageable host memory"):
        fused_experts(*replace(layer, w2=layer.w2.clone()).arguments())


def test_probe():
    rates = probe(footprint_bytes=[64 << 20, 256 << 20], programs=[8, 32], request_bytes=[128, 512], repetitions=2)
    assert len(rates.measurements) == 2 * (2 * 2 + 1)
    assert 1e9 < rates.sm_bytes_per_s < 1e12 and 1e9 < rates.ce_bytes_per_s < 1e12


def test_probe_reads_every_word():
    host = link.host_words(16 << 20)
    with page_lock(host):
        view = device_view(host, "cuda")
        assert link.read_checksum(view, 8, 128, 4, view.device) == link.checksum(host)
        torch.cuda.synchronize()
