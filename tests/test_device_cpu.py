"""The CPU as a device: memory with a side, copies that copy, streams in order."""

import gc

import pytest
import torch

from offload.cpu import CpuDevice
from offload.errors import ModelLoadError, OffloadConfigWarning


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice()


def test_one_warning_that_nothing_is_freed(device: CpuDevice) -> None:
    with pytest.warns(OffloadConfigWarning, match="host and device are one memory") as caught:
        device.allocate_host(100)
        device.allocate_host(100)
    assert len(caught) == 1
    assert not device.unified  # it would be refused, and a CPU is for trying things


@pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")
def test_residency_is_asked_of_the_address(device: CpuDevice) -> None:
    host, resident = device.allocate_host(1000), device.allocate_device(1000)
    host.fill_(7)
    assert device.residency(device.device_view(host)[512:640].view(torch.float32).view(4, 8)) == "host"
    assert device.residency(host[999:]) == "host"
    for tensor in (resident, host.clone(), torch.empty(3), host[500:].clone(memory_format=torch.contiguous_format)):
        assert device.residency(tensor) == "device"


@pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")
def test_a_host_address_that_is_used_again_is_not_host(device: CpuDevice) -> None:
    host = device.allocate_host(1 << 20)
    view = host[100:200]
    address = host.data_ptr()
    del host
    assert device.residency(view) == "host"
    del view
    gc.collect()
    again = [device.allocate_device(1 << 20) for _ in range(8)]
    assert address in [tensor.data_ptr() for tensor in again]
    assert all(device.residency(tensor) == "device" for tensor in again)


@pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")
@pytest.mark.parametrize("side", ["allocate_host", "allocate_device"])
def test_memory_is_exact_aligned_and_limited(device: CpuDevice, side: str) -> None:
    allocate = getattr(device, side)
    tensor = allocate(12345)
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (12345,)) and tensor.data_ptr() % 128 == 0
    needed = device.host_memory().free_bytes + 2**40
    with pytest.raises(ModelLoadError, match=r"not enough memory on the host: needs \d+\.\d+ GiB, has \d+\.\d+ GiB"):
        allocate(needed)


def test_values_cross_to_python_and_back(device: CpuDevice) -> None:
    tensor = device.from_host([[1, 2], [3, 4]])
    assert tensor.dtype == torch.int64 and device.to_host(tensor) == [[1, 2], [3, 4]]
    assert device.to_host(device.from_host([0.5], torch.float32)) == [0.5]


def test_streams_run_in_order_and_copies_copy(device: CpuDevice) -> None:
    side, event = device.new_stream(), device.new_event()
    source, destination = torch.arange(9), torch.zeros(9, dtype=torch.int64)
    device.copy(destination, source, side)
    device.record(event, side)
    device.wait(event)
    assert torch.equal(destination, source) and destination.data_ptr() != source.data_ptr()
    device.synchronise()
    device.close()


def test_a_graph_issues_its_body_again(device: CpuDevice) -> None:
    total, seen = torch.zeros(1), []

    def body() -> None:
        total.add_(1)
        seen.append(device.capturing)

    graph = device.capture(body)
    graph.replay()
    assert total.item() == 2 and seen == [True, False] and not device.capturing
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda: 1 / 0)
    assert not device.capturing
