"""Bytes on their way: conversion, splitting, the staging buffers, and failures that leave nothing behind."""

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from offload import reader as reading
from offload.errors import ModelLoadError
from offload.reader import Reader
from offload.shard import read_shard

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Accelerator:
    """A device whose copies happen as late as they may: when it is waited for, from what the source holds then."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.allocated: list[int] = []
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.log: list[str] = []
        self._fail_after = fail_after

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(nbytes)
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if self._fail_after is not None and len(self.log) >= self._fail_after:
            raise RuntimeError("the bus is gone")
        assert destination.shape == source.shape and destination.dtype == source.dtype
        self.log.append("copy")
        self.pending.append((destination, source))

    def synchronise(self) -> None:
        self.log.append("synchronise")
        for destination, source in self.pending:
            destination.copy_(source)
        self.pending.clear()


class Remote(torch.Tensor):
    """Host memory that says it is on another device, so that only `Device.copy` may write there."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def remote(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(Remote)


@pytest.fixture
def small_pieces(monkeypatch):
    """Sizes at which a small tensor takes several chunks, both threads and several rounds of staging."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 64)
    monkeypatch.setattr(reading, "SPLIT_BYTES", 100)
    monkeypatch.setattr(reading, "STAGING_BYTES", 160)


def opened(path, tensors, device=None) -> Reader:
    save_file(tensors, path)
    return Reader(read_shard(path, path.name), device or Accelerator())


def threads() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith("offload")}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.usefixtures("small_pieces")
def test_every_conversion_is_torchs_own(tmp_path, source, target):
    tensors = {"x": (torch.randn(37, 5, dtype=torch.float64) * 100).to(source), "one": torch.ones(1, dtype=source)}
    reader = opened(tmp_path / "x.safetensors", tensors)
    for name, tensor in tensors.items():
        destination = torch.full(tensor.shape, float("nan"), dtype=target)
        reader.read_into(name, destination)
        assert torch.equal(destination, tensor.to(target))
    reader.close()


@settings(max_examples=60)
@given(st.integers(0, 300), st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.booleans())
def test_any_size_reaches_any_memory_whole(tmp_path_factory, size, source, target, on_device):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "CHUNK_BYTES", 64)
        patch.setattr(reading, "SPLIT_BYTES", 100)
        patch.setattr(reading, "STAGING_BYTES", 160)
        tensor = torch.randn(size).to(source)
        reader = opened(tmp_path_factory.mktemp("any") / "x.safetensors", {"before": torch.ones(3), "x": tensor})
        around = torch.full((size + 2,), float("nan"), dtype=target)
        destination = around[1 : size + 1]
        reader.read_into("x", remote(destination) if on_device else destination)
        reader.close()
        assert torch.equal(destination, tensor.to(target))
        assert around[0].isnan() and around[-1].isnan()


@pytest.mark.usefixtures("small_pieces")
def test_staging_alternates_so_that_one_buffer_is_copied_while_the_other_is_read(tmp_path):
    device = Accelerator()
    reader = opened(tmp_path / "x.safetensors", {"x": torch.arange(200.0)}, device)
    destination = torch.full((200,), float("nan"))
    reader.read_into("x", remote(destination))
    assert device.allocated == [160, 160]
    assert device.log == ["synchronise", "copy"] * 5
    assert len(device.pending) == 1
    reader.close()
    assert device.log[-1] == "synchronise"
    assert torch.equal(destination, torch.arange(200.0))


def test_no_staging_for_host_memory(tmp_path):
    device = Accelerator()
    reader = opened(tmp_path / "x.safetensors", {"x": torch.ones(4)}, device)
    reader.read_into("x", torch.empty(4))
    reader.close()
    assert device.allocated == [] and device.log == []


def test_a_meta_destination_has_no_bytes_to_fill(tmp_path):
    device = Accelerator()
    reader = opened(tmp_path / "x.safetensors", {"x": torch.ones(4)}, device)
    reader.read_into("x", torch.empty(4, device="meta"))
    reader.close()
    assert device.allocated == []


@pytest.mark.usefixtures("small_pieces")
def test_closing_ends_the_thread_and_the_files_and_may_be_repeated(tmp_path):
    before = open_files()
    reader = opened(tmp_path / "x.safetensors", {"x": torch.ones(100)})
    reader.read_into("x", torch.empty(100))
    assert threads() and open_files() > before
    reader.close()
    reader.close()
    assert not threads() and open_files() == before


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("small_pieces")
def test_closing_that_is_interrupted_leaves_neither_thread_nor_file(tmp_path, monkeypatch):
    before = open_files()
    reader = opened(tmp_path / "x.safetensors", {"x": torch.ones(100)})
    reader.read_into("x", torch.empty(100))
    [helper] = [each for each in threading.enumerate() if each.name.startswith("offload")]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reader.close()
    del reader
    gc.collect()
    helper.join(timeout=30)
    assert not helper.is_alive() and open_files() == before


@pytest.mark.parametrize("cut_bytes", [4, 300], ids=["in this thread's half", "in both halves"])
@pytest.mark.usefixtures("small_pieces")
def test_a_file_that_shrinks_after_its_header_was_read(tmp_path, cut_bytes):
    path = tmp_path / "x.safetensors"
    reader = opened(path, {"x": torch.ones(100)})
    os.truncate(path, path.stat().st_size - cut_bytes)
    with pytest.raises(
        ModelLoadError, match='^x.safetensors ends within tensor "x", after its header was read: load again$'
    ):
        reader.read_into("x", torch.empty(100))
    reader.close()
    assert not threads()


def test_a_file_that_goes_away_after_its_header_was_read(tmp_path):
    path = tmp_path / "x.safetensors"
    reader = opened(path, {"x": torch.ones(100)})
    path.unlink()
    with pytest.raises(ModelLoadError, match=r"^x.safetensors cannot be read any more \(No such file or directory\)"):
        reader.read_into("x", torch.empty(100))
    reader.close()


def test_a_disk_that_fails(tmp_path, monkeypatch):
    reader = opened(tmp_path / "x.safetensors", {"x": torch.ones(100)})

    def failing(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    said = r'^x.safetensors: tensor "x" cannot be read \(Input/output error\): check the disk$'
    with pytest.raises(ModelLoadError, match=said):
        reader.read_into("x", torch.empty(100))
    reader.close()


@pytest.mark.usefixtures("small_pieces")
def test_short_reads_are_continued(tmp_path, monkeypatch):
    reader = opened(tmp_path / "x.safetensors", {"x": torch.arange(100.0)})
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: whole(file, [memoryview(buffers[0])[:7]], offset))
    destination = torch.full((100,), float("nan"))
    reader.read_into("x", destination)
    reader.close()
    assert torch.equal(destination, torch.arange(100.0))


@pytest.mark.usefixtures("small_pieces")
def test_the_two_threads_convert_in_buffers_of_their_own(tmp_path, monkeypatch):
    reader = opened(tmp_path / "x.safetensors", {"x": torch.arange(256.0)})
    whole, both = os.preadv, threading.Barrier(2, timeout=30)

    def together(*arguments):
        count = whole(*arguments)
        both.wait()
        return count

    monkeypatch.setattr(os, "preadv", together)
    destination = torch.full((256,), float("nan"), dtype=torch.float64)
    reader.read_into("x", destination)
    reader.close()
    assert torch.equal(destination, torch.arange(256.0, dtype=torch.float64))


@pytest.mark.parametrize("interrupted", ["MainThread", "offload-read_0"])
@pytest.mark.usefixtures("small_pieces")
def test_an_interrupt_in_either_half_stops_both_before_it_is_raised(tmp_path, monkeypatch, interrupted):
    reader = opened(tmp_path / "x.safetensors", {"x": torch.ones(10_000)})
    whole, running = os.preadv, set()

    def interrupting(*arguments):
        name = threading.current_thread().name
        if name == interrupted:
            raise KeyboardInterrupt
        running.add(name)
        try:
            return whole(*arguments)
        finally:
            running.discard(name)

    monkeypatch.setattr(os, "preadv", interrupting)
    with pytest.raises(KeyboardInterrupt):
        reader.read_into("x", torch.empty(10_000))
    assert not running
    reader.close()
    assert not threads()


@pytest.mark.usefixtures("small_pieces")
def test_an_interrupt_ends_the_other_half_after_the_chunk_at_hand(tmp_path, monkeypatch):
    reader = opened(tmp_path / "x.safetensors", {"x": torch.ones(10_000)})
    whole, chunks = os.preadv, []

    def interrupting(*arguments):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        if not chunks:
            reader._stopped.wait(timeout=5)
        chunks.append(arguments)
        return whole(*arguments)

    monkeypatch.setattr(os, "preadv", interrupting)
    with pytest.raises(KeyboardInterrupt):
        reader.read_into("x", torch.empty(10_000))
    assert len(chunks) <= 1
    reader.close()


@pytest.mark.usefixtures("small_pieces")
def test_a_copy_that_fails_still_waits_for_those_before_it(tmp_path):
    device = Accelerator(fail_after=3)
    reader = opened(tmp_path / "x.safetensors", {"x": torch.ones(200)}, device)
    with pytest.raises(RuntimeError, match="^the bus is gone$"):
        reader.read_into("x", remote(torch.empty(200)))
    reader.close()
    assert device.log[-1] == "synchronise" and not device.pending and not threads()


@pytest.mark.parametrize(
    ("destination", "said"),
    [
        (torch.empty(4, 3), r"shape \[4, 3\] and strides \[3, 1\]: it must be contiguous, of shape \[3, 4\]"),
        (torch.empty(4, 3).t(), r"shape \[3, 4\] and strides \[1, 3\]: it must be contiguous, of shape \[3, 4\]"),
    ],
    ids=["shape", "strides"],
)
def test_an_unfit_destination_is_refused(tmp_path, destination, said):
    reader = opened(tmp_path / "x.safetensors", {"x": torch.ones(3, 4)})
    with pytest.raises(ValueError, match=f'^the destination of "x" has {said}$'):
        reader.read_into("x", destination)
    reader.close()


def test_bytes_of_the_right_file_are_read(tmp_path):
    save_file({"x": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"y": torch.zeros(3)}, tmp_path / "b.safetensors")
    entries = read_shard(tmp_path / "a.safetensors", "a") | read_shard(tmp_path / "b.safetensors", "b")
    entries["z"] = replace(entries["y"], name="z")
    reader = Reader(entries, Accelerator())
    for name, value in (("y", 0.0), ("x", 1.0), ("z", 0.0), ("x", 1.0)):
        destination = torch.full((3,), float("nan"))
        reader.read_into(name, destination)
        assert (destination == value).all()
    reader.close()


@pytest.mark.gpu
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32], ids=str)
def test_device_memory_of_a_gpu_is_filled_through_page_locked_buffers(tmp_path, target):
    from offload.device import open_device

    device = open_device("cuda")
    # More than both buffers together, so that each is written a second time while the other is copied.
    tensor = torch.randn(3 * reading.STAGING_BYTES // 2 + 77, dtype=torch.bfloat16)
    reader = opened(tmp_path / "x.safetensors", {"x": tensor}, device)
    destination = torch.full(tensor.shape, float("nan"), dtype=target, device=device.torch_device)
    reader.read_into("x", destination)
    reader.close()
    assert torch.equal(destination.cpu(), tensor.to(target))
    device.close()
