"""Host memory as a device sees it, with CUDA replaced by a fake that keeps the same books."""

import ctypes
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from offload_kernels import device_view, is_host_resident, memory, page_lock

CARRIERS = {"|u1": torch.uint8, "<i2": torch.int16, "<i4": torch.int32, "<i8": torch.int64}


class FakeCuda:
    """Locked ranges, in place of the driver; a view is an ordinary tensor over the same address."""

    def __init__(self):
        self.locked = {}
        self.elsewhere = False

    def lock(self, address, size_bytes):
        assert address not in self.locked
        self.locked[address] = size_bytes

    def unlock(self, address):
        del self.locked[address]

    def memory_type(self, address):
        return 1 if any(first <= address < first + size for first, size in self.locked.items()) else None

    def from_array_interface(self, holder, device):
        self.interface = holder.__cuda_array_interface__
        tensor = holder.host.view(CARRIERS[self.interface["typestr"]])
        return tensor[1:] if self.elsewhere else tensor


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(memory, "cuda", lambda: fake)
    return fake


def test_lock_and_close(cuda):
    tensor = torch.zeros(6, 10, dtype=torch.bfloat16)
    handle = page_lock(tensor)
    assert cuda.locked == {tensor.data_ptr(): 120} and handle.size_bytes == 120
    handle.close()
    handle.close()
    assert cuda.locked == {}


def test_lock_as_a_context(cuda):
    with pytest.raises(KeyboardInterrupt), page_lock(torch.zeros(5)):
        assert len(cuda.locked) == 1
        raise KeyboardInterrupt
    assert cuda.locked == {}


def test_lock_spans_the_gaps_of_a_strided_tensor(cuda):
    tensor = torch.zeros(6, 10)[1:5, 2:7]
    assert page_lock(tensor).size_bytes == (3 * 10 + 5) * 4
    assert list(cuda.locked) == [tensor.data_ptr()]


def test_lock_keeps_the_tensor_until_close(cuda):
    tensor = torch.zeros(6)
    alive = weakref.ref(tensor)
    handle = page_lock(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    handle.close()
    gc.collect()
    assert alive() is None


def test_lock_of_nothing(cuda):
    page_lock(torch.empty(0, 4)).close()
    assert cuda.locked == {}


def test_lock_refuses_locked_pages(cuda):
    tensor = torch.zeros(6, 10)
    with (
        page_lock(tensor),
        pytest.raises(ValueError, match=r"pages of this \(3, 10\) torch.float32 tensor are locked already"),
    ):
        page_lock(tensor[3:])


def test_lock_refuses_a_device_tensor(cuda):
    with pytest.raises(ValueError, match="page_lock takes a host tensor, got one on meta"):
        page_lock(torch.zeros(6, device="meta"))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool], ids=str
)
def test_view_has_the_same_bytes(cuda, dtype):
    host = torch.arange(60).reshape(6, 10).to(dtype)
    with page_lock(host):
        view = device_view(host, "cuda:0")
    assert (view.dtype, view.shape, view.stride()) == (host.dtype, host.shape, host.stride())
    assert view.data_ptr() == host.data_ptr()
    assert torch.equal(view.view(torch.uint8), host.view(torch.uint8))
    assert cuda.interface["data"] == (host.data_ptr(), False)


def test_view_of_strided_rows(cuda):
    host = torch.zeros(6, 16, dtype=torch.bfloat16)
    with page_lock(host):
        view = device_view(host[1:4, :10], "cuda")
    assert view.stride() == (16, 1) and cuda.interface["strides"] == (32, 2)
    assert cuda.interface["shape"] == (3, 10) and view.data_ptr() == host[1].data_ptr()


def test_view_keeps_the_host_tensor(cuda):
    host = torch.zeros(6)
    alive = weakref.ref(host)
    holder = memory._Holder(host)
    del host
    gc.collect()
    assert alive() is holder.host


def test_view_refuses_pageable_memory(cuda):
    with pytest.raises(
        ValueError, match=r"pages of this \(6,\) torch.float32 tensor are not locked: page_lock\(tensor\) first"
    ):
        device_view(torch.zeros(6), "cuda:0")


def test_view_refuses_another_address(cuda):
    host = torch.zeros(6)
    cuda.elsewhere = True
    with page_lock(host), pytest.raises(RuntimeError, match="host memory is not mapped at its own address"):
        device_view(host, "cuda:0")


def test_view_on_the_cpu_is_the_tensor_itself():
    host = torch.zeros(6)
    assert device_view(host, "cpu") is host


def test_cpu_tensors_are_host_resident_without_cuda():
    assert is_host_resident(torch.zeros(6)) and not is_host_resident(torch.zeros(6, device="meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("call", [page_lock, lambda tensor: device_view(tensor, "cuda")], ids=["lock", "view"])
def test_without_cuda(call):
    with pytest.raises(RuntimeError, match="no CUDA device here: page-locked weights and device views need one"):
        call(torch.zeros(6))


class Driver:
    """The driver's library, as far as `memory.Cuda` calls it: what was asked, and the answers."""

    def __init__(self, memory_types):
        self.memory_types, self.context, self.copies = memory_types, None, []

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.context
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 7
        return 0

    def cuCtxSetCurrent(self, context):
        self.context = context.value
        return 0

    def cuPointerGetAttribute(self, kind, attribute, address):
        assert (self.context, attribute) == (7, 2), "no context is current, or another attribute was asked for"
        kind._obj.value = self.memory_types.get(address.value, 0)
        return 0 if address.value in self.memory_types else 1

    def cuMemcpyAsync(self, to, start, size, stream):
        self.copies.append((to.value, start.value, size.value, stream.value))
        return 0

    def cuMemcpy2DAsync_v2(self, what, stream):
        w = what._obj
        assert (w.src_type, w.dst_type, w.src_x_bytes, w.dst_y) == (4, 4, 0, 0)
        self.copies.append(
            (w.dst_device, w.dst_pitch_bytes, w.src_device, w.src_pitch_bytes, w.width_bytes, w.height, stream.value)
        )
        return 0


class Runtime:
    """`torch.cuda.cudart()`, with the statuses that it shall return."""

    def __init__(self, status=0):
        self.status, self.locked = status, []

    def cudaHostRegister(self, address, size_bytes, flags):
        self.locked.append((address, size_bytes, flags))
        return self.status

    def cudaHostUnregister(self, address):
        self.locked = [entry for entry in self.locked if entry[0] != address]
        return self.status


@pytest.fixture
def real(monkeypatch):
    """A `memory.Cuda` over fakes of the two libraries."""

    def make(memory_types=(), status=0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        api = memory.Cuda.__new__(memory.Cuda)
        api._driver, api._runtime = Driver(dict(memory_types)), Runtime(status)
        return api

    return make


def test_driver_is_asked_in_a_context(real):
    api = real({100: 1, 200: 2})
    assert [api.memory_type(address) for address in (100, 200, 300)] == [1, 2, None]


def test_runtime_locks_for_every_context(real):
    api = real()
    api.lock(100, 8)
    assert api._runtime.locked == [(100, 8, 1)]
    api.unlock(100)
    assert api._runtime.locked == []


def test_refused_lock_names_the_limit(real):
    with pytest.raises(RuntimeError, match="CUDA error 2 while locking 8 bytes .is the limit of `ulimit -l` lower"):
        real(status=2).lock(100, 8)


@pytest.mark.parametrize(
    "target, source, expected",
    [
        (torch.empty(3, 8), torch.empty(5, 8)[1:4], lambda t, s: (t, s, 96, 5)),
        (torch.empty(3, 8), torch.empty(5, 12)[1:4, :8], lambda t, s: (t, 32, s, 48, 32, 3, 5)),
        (torch.empty(1, 8), torch.empty(5, 12)[1:2, :8], lambda t, s: (t, s, 32, 5)),
    ],
    ids=["whole", "strided", "one-row"],
)
def test_rows_are_copied_with_their_pitch(real, target, source, expected):
    api = real()
    api.copy_rows(target, source, SimpleNamespace(cuda_stream=5))
    assert api._driver.copies == [expected(target.data_ptr(), source.data_ptr())]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_nothing_to_copy(real, shape):
    api = real()
    api.copy_rows(torch.empty(shape), torch.empty(shape), SimpleNamespace(cuda_stream=5))
    assert api._driver.copies == []


def test_layout_of_the_copy_is_the_driver_s():
    """CUDA_MEMCPY2D on 64 bits: 16 fields, enums padded to 8 bytes."""
    offsets = [getattr(memory._Copy2D, name).offset for name, _ in memory._Copy2D._fields_]
    assert offsets == list(range(0, 128, 8)) and ctypes.sizeof(memory._Copy2D) == 128
