"""Weights in host memory: lock their pages, view them from the device, ask where a tensor's bytes are.

Everything CUDA goes through the object that `cuda` returns, small enough for a test to put another in its place.
"""

import ctypes
from functools import cache
from types import TracebackType
from typing import Any, Self

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every context of the process
_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_HOST = 1  # CU_MEMORYTYPE_HOST
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the driver finds out from the address
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE: not an address that CUDA knows
_TYPESTR = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}  # by size: the array interface knows no bf16, no fp8


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver API."""

    _fields_ = [
        ("src_x_bytes", ctypes.c_size_t), ("src_y", ctypes.c_size_t), ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p), ("src_device", ctypes.c_uint64), ("src_array", ctypes.c_void_p),
        ("src_pitch_bytes", ctypes.c_size_t),
        ("dst_x_bytes", ctypes.c_size_t), ("dst_y", ctypes.c_size_t), ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p), ("dst_device", ctypes.c_uint64), ("dst_array", ctypes.c_void_p),
        ("dst_pitch_bytes", ctypes.c_size_t),
        ("width_bytes", ctypes.c_size_t), ("height", ctypes.c_size_t),
    ]  # fmt: skip


class Cuda:
    """The calls to CUDA that this package needs beside Triton's launches.

    Raises:
        RuntimeError: There is no CUDA here.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "no CUDA device here: page-locked weights and device views need one; on the CPU use plain tensors"
            )
        torch.cuda.init()
        self._runtime = torch.cuda.cudart()
        self._driver = ctypes.CDLL("libcuda.so.1")

    def lock(self, address: int, size_bytes: int) -> None:
        """Lock pages in memory and map them for every device."""
        status = int(self._runtime.cudaHostRegister(address, size_bytes, _PORTABLE))
        _demand(status, f"locking {size_bytes} bytes (is the limit of `ulimit -l` lower?)")

    def unlock(self, address: int) -> None:
        """Undo `lock`."""
        _demand(int(self._runtime.cudaHostUnregister(address)), "unlocking pages")

    def memory_type(self, address: int) -> int | None:
        """The driver's memory type of an address: 1 host, 2 device, None if CUDA does not know the address."""
        self._bind_context()
        kind = ctypes.c_uint()
        status = self._driver.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
        if status == _INVALID_VALUE:
            return None
        _demand(status, f"asking for the memory type of {address:#x}")
        return kind.value

    def _bind_context(self) -> None:
        """Give this thread the context that torch uses: the driver, unlike the runtime, does not do so by itself."""
        context = ctypes.c_void_p()
        _demand(self._driver.cuCtxGetCurrent(ctypes.byref(context)), "asking for the current context")
        if not context:
            device = ctypes.c_int(torch.cuda.current_device())
            _demand(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"opening {device.value}")
            _demand(self._driver.cuCtxSetCurrent(context), "setting the context")

    def from_array_interface(self, holder: Any, device: torch.device) -> torch.Tensor:
        """A tensor on ``device`` over the pointer of ``holder``, which it keeps alive."""
        return torch.as_tensor(holder, device=device)

    def copy_rows(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Queue a copy of the rows of a matrix; the driver sees from the addresses that it crosses the bus."""
        rows, width_bytes = source.shape[0], source.shape[1] * source.element_size()
        if rows == 0 or width_bytes == 0:
            return
        to, start, queue = target.data_ptr(), source.data_ptr(), ctypes.c_void_p(stream.cuda_stream)
        pitch, target_pitch = _pitch_bytes(source), _pitch_bytes(target)
        if pitch == target_pitch == width_bytes:
            size = ctypes.c_size_t(rows * width_bytes)
            status = self._driver.cuMemcpyAsync(ctypes.c_uint64(to), ctypes.c_uint64(start), size, queue)
        else:
            what = _Copy2D(
                src_type=_UNIFIED, src_device=start, src_pitch_bytes=pitch,
                dst_type=_UNIFIED, dst_device=to, dst_pitch_bytes=target_pitch,
                width_bytes=width_bytes, height=rows,
            )  # fmt: skip
            status = self._driver.cuMemcpy2DAsync_v2(ctypes.byref(what), queue)
        _demand(status, f"copying {rows} rows of {width_bytes} bytes")


@cache
def cuda() -> Cuda:
    """CUDA as this package uses it.

    Raises:
        RuntimeError: There is no CUDA here.
    """
    return Cuda()


class PageLock:
    """Pages of a host tensor, locked until `close`; keeps the tensor alive. Also a context manager.

    Close it only when no kernel and no view uses the memory any more: the device loses its mapping.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size_bytes = span_bytes(tensor)
        self._tensor: torch.Tensor | None = tensor
        self._address = tensor.data_ptr()
        self._cuda = cuda()
        if self.size_bytes:
            self._cuda.lock(self._address, self.size_bytes)

    def close(self) -> None:
        """Unlock the pages and let go of the tensor; a second call does nothing."""
        if self._tensor is None:
            return
        self._tensor = None
        if self.size_bytes:
            self._cuda.unlock(self._address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def page_lock(tensor: torch.Tensor) -> PageLock:
    """Lock the pages under a host tensor, so that kernels and the copy engine may read them.

    Args:
        tensor: CPU tensor, any shape, strides and dtype; it is locked in place, nothing is copied or rounded up.

    Returns:
        A handle with ``size_bytes`` and ``close()``.

    Raises:
        ValueError: The tensor is on a device, or its pages are locked already.
        RuntimeError: There is no CUDA here, or the system refuses to lock that much (``ulimit -l``).
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"page_lock takes a host tensor, got one on {tensor.device}")
    address = tensor.data_ptr()
    if address and cuda().memory_type(address) is not None:
        raise ValueError(
            f"the pages of this {tuple(tensor.shape)} {tensor.dtype} tensor are locked already: lock them once"
        )
    return PageLock(tensor)


class _Holder:
    """Carries a host pointer to the device side of torch and keeps the host tensor alive."""

    def __init__(self, host: torch.Tensor) -> None:
        size = host.element_size()
        self.host = host
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": tuple(host.shape),
            "strides": tuple(stride * size for stride in host.stride()),
            "typestr": _TYPESTR[size],
            "data": (host.data_ptr(), False),
        }


def device_view(host_tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """See page-locked host memory as a tensor of a device: the same bytes at the same address, nothing is copied.

    Args:
        host_tensor: CPU tensor in page-locked memory; any shape, strides and dtype.
        device: CUDA device, or ``cpu``, where the tensor itself is returned.

    Returns:
        A tensor of the same shape, strides and dtype on ``device``, which keeps ``host_tensor`` alive.

    Raises:
        ValueError: The tensor is not a host tensor or its pages are not locked.
        RuntimeError: There is no CUDA here, or this device reaches host memory at another address.
    """
    device = torch.device(device)
    if host_tensor.device.type != "cpu":
        raise ValueError(f"device_view takes a host tensor, got one on {host_tensor.device}")
    if device.type == "cpu":
        return host_tensor
    api = cuda()
    if host_tensor.numel() == 0:
        return torch.empty_strided(host_tensor.shape, host_tensor.stride(), dtype=host_tensor.dtype, device=device)
    if api.memory_type(host_tensor.data_ptr()) != _HOST:
        raise ValueError(
            f"the pages of this {tuple(host_tensor.shape)} {host_tensor.dtype} tensor are not locked: "
            "page_lock(tensor) first"
        )
    carrier = api.from_array_interface(_Holder(host_tensor), device)
    if carrier.data_ptr() != host_tensor.data_ptr():
        raise RuntimeError(
            f"{device} sees {host_tensor.data_ptr():#x} at {carrier.data_ptr():#x}: "
            "host memory is not mapped at its own address"
        )
    return carrier.view(host_tensor.dtype)


def is_host_resident(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are in host memory, whatever device it claims: the driver is asked about the address.

    Managed memory counts as what the driver says of its address. A CUDA tensor without elements is on its device.

    Args:
        tensor: Any tensor with storage.
    """
    if tensor.device.type == "cpu":
        return True
    if tensor.device.type != "cuda" or tensor.numel() == 0:
        return False
    return cuda().memory_type(tensor.data_ptr()) == _HOST


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last, gaps included."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _pitch_bytes(matrix: torch.Tensor) -> int:
    """Bytes from one row to the next (a single row: its width, since its stride says nothing)."""
    columns = matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]
    return columns * matrix.element_size()


def _demand(status: int, what: str) -> None:
    """Turn a CUDA status other than success into an error."""
    if status:
        raise RuntimeError(f"CUDA error {status} while {what}")
