"""Bytes from safetensors files to where they stay: each is read once, and nothing exists twice.

Host memory is filled by reading the file straight into it, half of each tensor by a second thread, since one thread
does not saturate a memory bus. Device memory is filled through two page-locked buffers: one is copied while the next
is read. A dtype is converted in chunks that fit in a cache.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from offload.device import Device
from offload.errors import ModelLoadError
from offload.shard import Entry
from offload.text import shortened

CHUNK_BYTES = 2 << 20
"""Read at once: Ctrl-C is soon noticed, and a chunk is still in the cache when it is converted."""
SPLIT_BYTES = 1 << 20
"""Smaller tensors are read by one thread: handing half of one over would take as long as reading it."""
STAGING_BYTES = 16 << 20
"""Size of each of the two page-locked buffers on the way to a device."""


class Reader:
    """Reads tensors of open files into given memory.

    Args:
        entries: where each tensor is.
        device: whose memory destinations may be in; the buffers for them are allocated when first needed.
    """

    def __init__(self, entries: Mapping[str, Entry], device: Device) -> None:
        self._entries = entries
        self._device = device
        self._files: dict[Path, FileIO] = {}
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-read")
        self._stopped = threading.Event()
        self._scratch = (_Scratch(), _Scratch())
        self._staging: tuple[Tensor, Tensor] | None = None
        self._turn = 0

    def read_into(self, checkpoint_name: str, destination: Tensor) -> None:
        """Copy one tensor, dtype converted on the way, into `destination`: (the tensor's shape), contiguous.

        Host memory is filled when this returns, device memory when `close` does.

        Raises:
            ModelLoadError: the file ends before the tensor does, or cannot be read.
            ValueError: the destination has another shape or is not contiguous.
        """
        entry = self._entries[checkpoint_name]
        if tuple(destination.shape) != entry.shape or not destination.is_contiguous():
            raise ValueError(
                f"the destination of {shortened(checkpoint_name)} has shape {list(destination.shape)} and strides "
                f"{list(destination.stride())}: it must be contiguous, of shape {list(entry.shape)}"
            )
        flat = destination.detach().view(-1)
        if flat.device.type == "cpu":
            self._fill(entry, 0, flat)
        elif flat.device.type != "meta":
            self._fill_through_staging(entry, flat)

    def close(self) -> None:
        """End the thread, close the files, and wait for the copies to the device. Idempotent."""
        self._stopped.set()
        self._helper.shutdown(wait=True)
        while self._files:
            self._files.popitem()[1].close()
        if self._staging is not None:
            # The buffers must not go back to the system while a copy still reads them.
            self._device.synchronise()
            self._staging = None

    def _fill(self, entry: Entry, first: int, flat: Tensor) -> None:
        """Read elements `first` and on of a tensor into host memory; no thread writes there when it ends."""
        file = self._open(entry.path)
        middle = flat.numel() // 2 if flat.nbytes >= SPLIT_BYTES else flat.numel()
        other: Future[None] | None = None
        if middle < flat.numel():
            other = self._helper.submit(self._copy, file, entry, first + middle, flat[middle:], self._scratch[1])
        try:
            self._copy(file, entry, first, flat[:middle], self._scratch[0])
        except BaseException:
            self._stopped.set()
            wait([other] if other else [])
            raise
        if other:
            other.result()

    def _copy(self, file: FileIO, entry: Entry, first: int, flat: Tensor, scratch: _Scratch) -> None:
        """Read into `flat`, chunk by chunk, until it is full or the reader is stopped."""
        itemsize = entry.dtype.itemsize
        step = CHUNK_BYTES // max(itemsize, flat.itemsize)
        for begin in range(0, flat.numel(), step):
            if self._stopped.is_set():
                return
            piece = flat[begin : begin + step]
            raw = piece if piece.dtype == entry.dtype else scratch.of(entry.dtype, piece.numel())
            _read_exactly(file, entry, entry.offset_bytes + (first + begin) * itemsize, raw)
            if raw is not piece:
                piece.copy_(raw)

    def _fill_through_staging(self, entry: Entry, flat: Tensor) -> None:
        if self._staging is None:
            self._staging = (self._device.allocate_host(STAGING_BYTES), self._device.allocate_host(STAGING_BYTES))
        step = STAGING_BYTES // flat.itemsize
        for begin in range(0, flat.numel(), step):
            piece = flat[begin : begin + step]
            staged = self._staging[self._turn][: piece.nbytes].view(piece.dtype)
            self._fill(entry, begin, staged)
            # While this buffer was read, the other was copied. Waiting here lets the next round write to that one.
            self._device.synchronise()
            self._device.copy(piece, staged)
            self._turn = 1 - self._turn

    def _open(self, path: Path) -> FileIO:
        # An object and no number: should Ctrl-C come while the reader is closed, the file still goes with the reader.
        if path not in self._files:
            try:
                self._files[path] = FileIO(path)
            except OSError as error:
                raise ModelLoadError(f"{path.name} cannot be read any more ({error.strerror}): load again") from error
        return self._files[path]


class _Scratch:
    """A buffer of one chunk in the file's dtype, kept from chunk to chunk; one per thread."""

    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def of(self, dtype: torch.dtype, elements: int) -> Tensor:
        if self._bytes is None:
            self._bytes = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")
        return self._bytes[: elements * dtype.itemsize].view(dtype)


def _read_exactly(file: FileIO, entry: Entry, offset_bytes: int, target: Tensor) -> None:
    """Fill `target`, which is contiguous host memory, from a place in a file."""
    done, total = 0, target.nbytes
    while done < total:
        buffer = (ctypes.c_char * (total - done)).from_address(target.data_ptr() + done)
        try:
            count = os.preadv(file.fileno(), [buffer], offset_bytes + done)
        except OSError as error:
            what = f"{entry.label}: tensor {shortened(entry.name)} cannot be read ({error.strerror})"
            raise ModelLoadError(f"{what}: check the disk") from error
        if count == 0:
            name = shortened(entry.name)
            raise ModelLoadError(f"{entry.label} ends within tensor {name}, after its header was read: load again")
        done += count
