"""Memory follows the lifetime of storages, and running out of it says what held how much."""

import gc
from dataclasses import replace

import pytest
import torch

from offload.errors import ModelLoadError
from offload.virtual import VirtualDevice, VirtualOutOfMemoryError, load_profile
from offload.virtual.memory import MemoryAccount

GIB = 1 << 30


@pytest.fixture(params=["cpu", "meta"])
def device(request):
    profile = replace(load_profile("h200-pcie5"), memory_bytes=1000, host_memory_bytes=500)
    return VirtualDevice(profile, request.param)


def test_residency_is_a_question_to_the_device(device):
    host, slot = device.allocate_host(64), device.allocate_device(64)
    assert device.residency(host) == device.residency(host[8:].view(torch.float32)) == "host"
    assert device.residency(device.device_view(host)) == "host"
    assert device.residency(slot) == "device"
    with device.active():
        assert device.residency(host.clone()) == "device"
    assert device.residency(host.view(torch.float32).contiguous()) == "host"


def test_a_view_of_device_memory_is_not_a_host_view(device):
    with pytest.raises(ValueError, match="allocate_host"):
        device.device_view(device.allocate_device(8))


def test_memory_comes_back_with_the_last_view(device):
    host = device.allocate_host(100)
    view = host[10:]
    del host
    assert device.host_memory().free_bytes == 400
    del view
    gc.collect()
    assert device.host_memory().free_bytes == 500


def test_activations_count_while_they_live(device):
    x = device.allocate_device(400)
    with device.active():
        y = x + 1
        z = y[100:]
        assert device.device_memory().free_bytes == 200
        del y
        assert device.device_memory().free_bytes == 200
        del z
        assert device.device_memory().free_bytes == 600
    assert device.account.peak_device_bytes == 800


def test_an_interrupt_while_memory_is_let_go_is_not_lost():
    forgotten = []

    def interrupted_once(storage):
        forgotten.append(storage)
        if len(forgotten) == 1:
            raise KeyboardInterrupt

    account = MemoryAccount(100, 100, interrupted_once)
    tensors = [torch.empty(30, dtype=torch.uint8) for _ in range(2)]
    held = [account.hold(tensor, "device", "weights") for tensor in tensors]
    tensors.clear()
    with pytest.raises(KeyboardInterrupt):
        account.free("device")
    assert account.free("device").free_bytes == 100
    assert set(forgotten) == set(held)


def test_out_of_memory_in_an_operator_says_what_is_held(device):
    slot, rest = device.allocate_device(300), device.allocate_device(400)
    device.stamp(slot, 0)
    with device.active(), pytest.raises(torch.OutOfMemoryError) as caught:
        rest + 1
    text = str(caught.value)
    assert "out of device memory" in text and "offload more" in text
    assert text.index("weights and cache") < text.index("slots")


def test_out_of_memory_when_reserving_is_a_load_error(device):
    with pytest.raises(ModelLoadError, match="out of device memory"):
        device.allocate_device(1001)
    with pytest.raises(VirtualOutOfMemoryError, match="out of host memory.*offload less"):
        device.allocate_host(501)
    assert device.device_memory().free_bytes == 1000


def test_a_model_larger_than_this_machine_fits_on_meta():
    device = VirtualDevice("h200-pcie5", "meta")
    host = device.allocate_host(400 * GIB)
    assert device.host_memory().free_bytes == 112 * GIB
    assert device.residency(host[399 * GIB :]) == "host"


def test_a_mapped_file_is_not_device_memory(tmp_path):
    device = VirtualDevice(replace(load_profile("h200-pcie5"), memory_bytes=1000))
    path = tmp_path / "weights"
    path.write_bytes(bytes(5000))
    mapped = torch.from_file(str(path), size=5000, dtype=torch.uint8)
    target = device.allocate_device(900)
    device.copy(target, mapped[:900])
    assert device.device_memory().free_bytes == 100


def test_memory_is_aligned_to_a_line():
    device = VirtualDevice("h200-pcie5")
    for nbytes in (1, 100, 1000):
        assert device.allocate_device(nbytes).data_ptr() % 128 == 0
        assert device.allocate_host(nbytes).data_ptr() % 128 == 0


def test_what_was_not_written_is_no_number():
    memory = VirtualDevice("h200-pcie5").allocate_device(64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert memory.view(dtype).isnan().all()


def test_numbers_must_fit_this_machine_too():
    profile = replace(load_profile("h200-pcie5"), memory_bytes=1 << 50, host_memory_bytes=1 << 50)
    device = VirtualDevice(profile)
    with pytest.raises(ModelLoadError, match="this machine.*load format meta"):
        device.allocate_host(1 << 45)
    VirtualDevice(profile, "meta").allocate_host(1 << 45)
