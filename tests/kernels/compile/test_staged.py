"""The order of copies and products of the staged schedule, by vector clocks: fake streams around the real code."""

import pytest
import torch

from offload_kernels import memory, staged


class Stream:
    """What one stream has seen of each stream's work, as counts."""

    def __init__(self, name):
        self.name, self.seen = name, {"compute": 0, "side": 0}

    def work(self):
        self.seen[self.name] += 1
        return dict(self.seen)

    def record_event(self):
        return dict(self.seen)

    def wait_event(self, event):
        self.seen = {name: max(count, event[name]) for name, count in self.seen.items()}

    def wait_stream(self, other):
        self.wait_event(other.seen)

    def has_seen(self, moment):
        return all(self.seen[name] >= count for name, count in moment.items())


class Streams:
    """Compute and side stream, and the last write and read of every byte of the ring."""

    def __init__(self, monkeypatch, ring):
        self.compute, self.side = Stream("compute"), Stream("side")
        self.ring, self.written, self.read = ring, {}, {}
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.compute)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: self.side)
        monkeypatch.setattr(memory, "cuda", lambda: self)
        self.before = self.compute.work()

    def slot(self, tensor):
        return (tensor.data_ptr() - self.ring.data_ptr()) // self.ring[0].nbytes

    def copy_rows(self, target, source, stream):
        slot = self.slot(target)
        assert stream.has_seen(self.before), "the copy may precede what used the ring's memory before"
        assert stream.has_seen(self.read.get(slot, {})), "the copy may overwrite a chunk that is still multiplied"
        self.written[slot] = stream.work()
        target.copy_(source)

    def multiply(self, chunk):
        slot = self.slot(chunk)
        assert self.compute.has_seen(self.written[slot]), "the product may read a chunk that has not arrived"
        self.read[slot] = self.compute.work()


@pytest.mark.parametrize("N", [1, 2, 3, 9, 70])
def test_order(monkeypatch, N):
    weight = torch.randn(N, 8)
    ranges = staged.chunks(N, 32)
    ring = torch.full((2, ranges[0][1], 8), float("nan"))
    streams = Streams(monkeypatch, ring)
    for (first, end), chunk in zip(ranges, staged.copy_on_stream(weight, ranges, ring), strict=True):
        assert torch.equal(chunk, weight[first:end])
        streams.multiply(chunk)
    assert streams.compute.has_seen(streams.side.seen), "a copy may still run when the ring is freed"
    assert streams.side.seen["side"] == len(ranges)


def test_copies_run_ahead(monkeypatch):
    """While chunk n is multiplied, chunk n + 1 is on its way: its copy does not wait for that product."""
    weight, ranges = torch.randn(8, 8), [(0, 2), (2, 4), (4, 6), (6, 8)]
    streams = Streams(monkeypatch, torch.empty(2, 2, 8))
    for number, chunk in enumerate(staged.copy_on_stream(weight, ranges, streams.ring)):
        if number + 1 < len(ranges):
            assert streams.written[(number + 1) % 2]["compute"] <= streams.before["compute"] + number
        streams.multiply(chunk)
