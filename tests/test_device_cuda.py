"""The CUDA device, driven by a fake of the few calls it makes; and, with a GPU, the backends on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import offload.cuda
from offload.cuda import CudaDevice, device_count
from offload.device import FreeMemory, open_device
from offload.errors import ModelLoadError, NotEnoughMemoryError
from tests.toys import TOKENS, Toy, offloaded, prefetch, uva

GIB = 2**30


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for event {event.number}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.number = cuda, cuda.events
        cuda.events += 1

    def record(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"{stream.name} records event {self.number}")


class FakeCuda:
    """The part of `torch.cuda` that the device uses; `log` has what was issued, in order."""

    def __init__(self, count: int = 2, integrated: bool = False, free_bytes: int = 8 * GIB) -> None:
        self.count, self.integrated, self.free_bytes = count, integrated, free_bytes
        self.log: list[str] = []
        self.events = self.streams = 0
        self.current = [FakeStream(self, "compute")]

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(is_integrated=int(self.integrated))

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.free_bytes, 16 * GIB

    def memory_reserved(self, index: int) -> int:
        return 3 * GIB

    def memory_allocated(self, index: int) -> int:
        return GIB

    def Stream(self, index: int) -> FakeStream:
        self.streams += 1
        return FakeStream(self, f"side {self.streams}")

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    def current_stream(self, index: int) -> FakeStream:
        return self.current[-1]

    def synchronize(self, index: int) -> None:
        self.log.append("synchronise")

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        self.current.append(stream or self.current[-1])
        yield
        self.current.pop()

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.current.append(FakeStream(self, "capture"))
        self.log.append("capture begins")
        try:
            yield
        finally:
            self.log.append("capture ends")
            self.current.pop()


class FakeMemory:
    """`offload_kernels.memory` without CUDA: an address is on the host if its pages are locked."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.locked: dict[int, int] = {}
        self.refuse = False

    @contextmanager
    def page_lock(self, tensor: Tensor) -> Iterator[None]:
        if self.refuse:
            raise RuntimeError("CUDA error 2 while locking pages")
        start, nbytes = tensor.data_ptr(), tensor.numel()
        self.locked[start] = start + nbytes
        self.log.append(f"lock {nbytes}")
        yield
        del self.locked[start]
        self.log.append(f"unlock {nbytes}")

    def device_view(self, host: Tensor, device: torch.device) -> Tensor:
        return host.view(host.shape)

    def is_host_resident(self, tensor: Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end in self.locked.items())


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def memory(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    fake = FakeMemory(cuda.log)
    monkeypatch.setattr(offload.cuda, "memory", fake)
    monkeypatch.setattr(
        offload.cuda, "free_host_memory", lambda locked=False: FreeMemory(GIB if locked else 99 * GIB, GIB)
    )
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: cuda.log.append("pin") or tensor)
    return fake


@pytest.fixture
def device(cuda: FakeCuda, memory: FakeMemory) -> CudaDevice:
    made = CudaDevice(1, cuda)
    assert made.name == "cuda:1" and made.torch_device == torch.device("cuda", 1)
    made.torch_device = torch.device("cpu")
    return made


def test_gpus_are_counted() -> None:
    assert device_count(FakeCuda(3)) == 3
    assert device_count(FakeCuda(0)) == 0


def test_an_integrated_gpu_says_that_there_is_one_memory() -> None:
    assert CudaDevice(0, FakeCuda(integrated=True)).unified
    assert not CudaDevice(0, FakeCuda()).unified


def test_pages_are_locked_until_the_last_view_dies(device: CudaDevice, cuda: FakeCuda, memory: FakeMemory) -> None:
    host = device.allocate_host(5000)
    view = device.device_view(host[128:256])
    assert cuda.log == ["lock 5000"]
    assert device.residency(view) == "host" and device.residency(torch.empty(3)) == "device"
    del host
    assert cuda.log == ["lock 5000"]
    del view
    assert cuda.log == ["lock 5000", "synchronise", "unlock 5000"] and not memory.locked


def test_host_memory_is_checked_before_it_is_mapped(device: CudaDevice, cuda: FakeCuda) -> None:
    assert device.host_memory().free_bytes == 99 * GIB
    with pytest.raises(ModelLoadError, match=r"needs 100\.000 GiB, has 99\.000 GiB; offload less.*cgroup"):
        device.allocate_host(100 * GIB)
    assert cuda.log == []


def test_the_limit_of_locked_pages_refuses_only_if_the_driver_does(device: CudaDevice, memory: FakeMemory) -> None:
    device.allocate_host(2 * GIB)
    memory.refuse = True
    needs = r"needs 2\.000 GiB, memlock leaves 1\.000 GiB; the driver says CUDA error 2 .*ulimit -l"
    with pytest.raises(NotEnoughMemoryError, match=needs):
        device.allocate_host(2 * GIB)
    assert not memory.locked


def test_a_refused_lock_is_a_load_error_and_leaves_nothing(device: CudaDevice, memory: FakeMemory) -> None:
    memory.refuse = True
    with pytest.raises(ModelLoadError, match=r"cannot page-lock .* of host memory: CUDA error 2"):
        device.allocate_host(4096)
    assert not memory.locked


def test_device_memory_counts_what_the_allocator_holds_unused(device: CudaDevice, cuda: FakeCuda) -> None:
    assert device.device_memory() == FreeMemory(8 * GIB + 2 * GIB, 16 * GIB)
    cuda.free_bytes = 0
    with pytest.raises(ModelLoadError, match=r"not enough memory on cuda:1: needs 2\.500 GiB, has 2\.000 GiB"):
        device.allocate_device(5 * GIB // 2)


def test_an_allocation_that_fails_after_all_is_a_load_error(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("fragmented")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(NotEnoughMemoryError, match=r"no 1\.000 GiB in one piece on cuda:1") as caught:
        device.allocate_device(GIB)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (GIB, 10 * GIB)


def test_no_stream_means_torchs_current_one(device: CudaDevice, cuda: FakeCuda) -> None:
    event, side = device.new_event(), device.new_stream()
    device.record(event)
    device.record(event, side)
    device.wait(event)
    device.wait(event, side)
    with cuda.stream(FakeStream(cuda, "the caller's")):
        device.record(event)
        device.wait(event)
    device.synchronise()
    assert cuda.log == [
        "compute records event 0", "side 1 records event 0", "compute waits for event 0", "side 1 waits for event 0",
        "the caller's records event 0", "the caller's waits for event 0", "synchronise",
    ]  # fmt: skip


def test_a_copy_is_asynchronous_on_its_stream(device: CudaDevice, cuda: FakeCuda) -> None:
    class Destination:
        def copy_(self, source: str, non_blocking: bool) -> None:
            cuda.log.append(f"copy of {source} on {cuda.current[-1].name}, non_blocking={non_blocking}")

    device.copy(Destination(), "layer 3", device.new_stream())
    device.copy(Destination(), "vectors")
    assert cuda.log == [
        "copy of layer 3 on side 1, non_blocking=True",
        "copy of vectors on compute, non_blocking=True",
    ]


def test_values_cross_by_pinned_memory(device: CudaDevice, cuda: FakeCuda) -> None:
    assert device.to_host(device.from_host([[1, 2]])) == [[1, 2]]
    assert cuda.log == ["pin"]


def test_a_capture_issues_to_its_own_stream(device: CudaDevice, cuda: FakeCuda) -> None:
    seen = []

    def body() -> None:
        seen.append(device.capturing)
        device.record(device.new_event())

    graph = device.capture(body)
    graph.replay()
    assert seen == [True] and not device.capturing
    assert cuda.log == ["capture begins", "capture records event 0", "capture ends", "replay"]
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda: 1 / 0)
    assert not device.capturing


@pytest.mark.usefixtures("memory")
def test_the_calls_of_a_prefetch_pass(device: CudaDevice, cuda: FakeCuda) -> None:
    model = Toy([3, 4])
    backend, _ = offloaded(model, prefetch(), device)
    first = ["compute records event 0", "side 1 waits for event 0", "side 1 records event 1"]
    assert cuda.log[1:] == first
    cuda.log.clear()
    for index in (0, 1):
        layer = model.layers[index]
        layer.down.register_forward_pre_hook(lambda *_, index=index: cuda.log.append(f"layer {index} runs"))
    for _ in range(2):
        with torch.inference_mode():
            model(TOKENS)
    refill = ["compute records event 0", "side 1 waits for event 0", "side 1 records event 1"]
    one_pass = [["compute waits for event 1", f"layer {index} runs", *refill] for index in (0, 1)]
    assert cuda.log == sum(one_pass * 2, [])
    backend.close()
    assert cuda.log[-3] == "synchronise" and cuda.log[-1].startswith("unlock")


@pytest.mark.usefixtures("memory")
def test_a_uva_model_with_the_plain_models_numbers(device: CudaDevice) -> None:
    model, plain = Toy([3, 4]), Toy([3, 4])
    offloaded(model, uva(1e9), device)
    with torch.inference_mode():
        assert torch.equal(model(TOKENS), plain(TOKENS))


# -- with a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [None, prefetch(), prefetch(2, 1, 2), uva(1e9)], ids=["none", "prefetch-1", "prefetch-2", "uva"]
)
def test_on_a_gpu(config: object) -> None:
    device = open_device("cuda")
    model, plain = Toy([64, 128, 64, 32]), Toy([64, 128, 64, 32]).to(device.torch_device)
    backend, planned = offloaded(model, config, device)
    tokens = device.from_host(TOKENS.tolist())
    exact = planned.backend != "uva"
    with device.active(), torch.inference_mode():
        expected = plain(tokens)
        for _ in range(3):
            difference = (model(tokens) - expected).abs().max().item()
            assert difference == 0 if exact else difference < 1e-5
    backend.close()
    assert backend.report().locked_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("config", [prefetch(), prefetch(1, 1, 2), uva(1e9)], ids=["prefetch-1", "prefetch-2", "uva"])
def test_capture_on_a_gpu(config: object) -> None:
    device = open_device("cuda")
    model = Toy([64, 128, 64, 32])
    backend, _ = offloaded(model, config, device)
    tokens = device.from_host(TOKENS.tolist())
    with device.active(), torch.inference_mode():
        expected = model(tokens).clone()
        result = torch.full_like(expected, float("nan"))

        def body() -> None:
            result.copy_(model(tokens))
            backend.before_capture_ends()

        backend.before_capture()
        graph = device.capture(body)
        backend.after_capture()
        for _ in range(3):
            backend.before_capture()
            graph.replay()
            assert torch.equal(result, expected)
            result.fill_(float("nan"))
            assert torch.equal(model(tokens), expected)
    device.synchronise()
    backend.close()
