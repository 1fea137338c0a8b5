"""`linear` on a GPU with real launches over the bus.

Memory errors and races are found by running the small cases under a sanitizer, with `memcheck` and with `racecheck`:

    compute-sanitizer --tool memcheck --kernel-regex kns=_kernel \\
        python -m pytest -m gpu tests/kernels/compile/test_gpu.py -k small
"""

import pytest
import torch

from offload_kernels import check_weight, device_view, is_host_resident, linear, page_lock
from tests.kernels.yardstick import assert_accurate

pytestmark = pytest.mark.gpu

SCHEDULES = ["skinny", "wide", "staged"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = {
    "small": (3, 200, 264),
    "small-ragged": (33, 131, 257),
    "decode": (1, 4096, 4096),
    "batch": (16, 14336, 4096),
    "ragged": (100, 4099, 2051),
    "full": (256, 8192, 8192),
}
WIDE_SHAPES = {"above": (257, 4096, 4096), "small-above": (300, 700, 130), "prefill": (2048, 14336, 4096)}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what `torch.empty` returns with NaN, the scratch of the kernels included (cuBLAS may stay as it is)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def cases():
    for schedule in SCHEDULES:
        for name, shape in (SHAPES if schedule == "skinny" else SHAPES | WIDE_SHAPES).items():
            yield pytest.param(schedule, shape, id=f"{schedule}-{name}")


def inputs(shape, dtype):
    M, N, K = shape
    x, bias = torch.randn(M, K, device="cuda").to(dtype), torch.randn(N, device="cuda").to(dtype)
    return x, torch.randn(N, K).to(dtype).pin_memory(), bias


def check(y, x, weight, bias):
    """The yardstick with cuBLAS as torch's product, on the device."""
    assert_accurate(y, x, weight.to(x.device), bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule, shape", list(cases()))
def test_pinned_weight(schedule, shape, dtype):
    x, weight, bias = inputs(shape, dtype)
    y = linear(x, weight, bias, schedule=schedule)
    check(y, x, weight, bias)
    assert torch.equal(linear(x, weight, bias, schedule=schedule), y)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("columns", [512, 300, 257], ids=["small-lines", "small-8-bytes", "small-2-bytes"])
def test_view_of_locked_rows(schedule, columns):
    slab = torch.randn(600, 512).to(torch.bfloat16)
    with page_lock(slab):
        weight = device_view(slab[10:500, :columns], "cuda")
        assert is_host_resident(weight) and weight.data_ptr() == slab[10].data_ptr()
        x = torch.randn(40, columns, device="cuda", dtype=torch.bfloat16)
        y = linear(x, weight, schedule=schedule)
        check(y, x, slab[10:500, :columns], None)
        torch.cuda.synchronize()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_off_sixteen_bytes_small(schedule):
    slab = torch.randn(200 * 257 + 1).to(torch.float16).pin_memory()
    weight = slab[1:].view(200, 257)
    assert check_weight(weight).load_bytes == 2
    x = torch.randn(20, 257, device="cuda", dtype=torch.float16)
    check(linear(x, weight, schedule=schedule), x, weight, None)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resident_weight_small(schedule):
    x, weight, bias = inputs((20, 300, 400), torch.bfloat16)
    check(linear(x, weight.cuda(), bias, schedule=schedule), x, weight, bias)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_split_k_and_padding_are_not_written_small(schedule):
    x, weight, bias = inputs((5, 100, 8192), torch.bfloat16)
    storage = torch.full((7, 110), float("nan"), dtype=torch.bfloat16, device="cuda")
    out = storage[1:6, 3:103]
    linear(x, weight, bias, schedule=schedule, out=out)
    check(out, x, weight, bias)
    assert storage.isnan().sum() == storage.numel() - out.numel()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_captured_and_replayed(schedule):
    x, weight, bias = inputs((64, 4096, 2048), torch.bfloat16)
    out = torch.empty(64, 4096, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        linear(x, weight, bias, schedule=schedule, out=out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(x, weight, bias, schedule=schedule, out=out)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        weight.copy_(torch.randn_like(weight))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(out, x, weight, bias)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_another_stream(schedule):
    x, weight, bias = inputs((64, 4096, 2048), torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ys = [linear(x, weight, bias, schedule=schedule) for _ in range(4)]
    side.synchronize()
    for y in ys:
        check(y, x, weight, bias)


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_pageable_weight_is_refused(schedule):
    x, weight, bias = inputs((4, 64, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="is in pageable host memory, which the GPU cannot read: page_lock"):
        linear(x, weight.clone(), bias, schedule=schedule)


def test_residency_is_asked_of_the_driver():
    host = torch.zeros(1000, dtype=torch.bfloat16)
    assert is_host_resident(host) and not is_host_resident(torch.zeros(1000, device="cuda"))
    with page_lock(host):
        view = device_view(host, "cuda")
        assert is_host_resident(view[500:].view(torch.uint8))
        assert not is_host_resident(view.clone())
        with pytest.raises(ValueError, match="are locked already"):
            page_lock(host[10:])
    with pytest.raises(ValueError, match="are not locked: page_lock"):
        device_view(host, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64], ids=str)
def test_view_has_the_same_bytes(dtype):
    host = torch.arange(64).to(dtype)
    with page_lock(host):
        view = device_view(host, "cuda")
        assert view.dtype is dtype and torch.equal(view.cpu().view(torch.uint8), host.view(torch.uint8))
        torch.cuda.synchronize()


def test_scratch_of_wide_is_at_most_half_of_the_weight():
    x, weight, _ = inputs((300, 8192, 4096), torch.bfloat16)
    out = torch.empty(300, 8192, dtype=torch.bfloat16, device="cuda")
    linear(x, weight, schedule="wide", out=out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear(x, weight, schedule="wide", out=out)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= weight.nbytes // 2
