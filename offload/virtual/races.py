"""Races: two operators touch the same bytes, one of them writes, and nothing orders them. Or bytes are read that nobody
wrote.

For every storage the detector keeps byte ranges with the last write and, per stream, the last read since. An access is
checked against them when it is issued, by vector clocks, so the verdict does not depend on simulated times.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from offload.virtual.clocks import Clock, Entry

Range = tuple[int, int, int]
"""Storage, first byte, byte past the end."""


class RaceError(RuntimeError):
    """Two operators touch the same bytes and nothing orders them, or bytes are read that were never written."""


class _Segment:
    """Bytes `start..end` of one storage that were last touched alike; `blank` if they are known to be unwritten."""

    __slots__ = ("start", "end", "write", "reads", "blank")

    def __init__(self, start: int, end: int, write: Entry | None, reads: dict[int, Entry], blank: bool = False) -> None:
        self.start = start
        self.end = end
        self.write = write
        self.reads = reads
        self.blank = blank


class RaceDetector:
    """Last accesses by byte range, per storage.

    Args:
        describe: names a byte range in a message ("bytes 0..64 of slot 1").
    """

    def __init__(self, describe: Callable[[Range], str]) -> None:
        self._describe = describe
        self._segments: dict[int, list[_Segment]] = {}

    def forget(self, storage: int) -> None:
        """The storage died; its number may be used again."""
        self._segments.pop(storage, None)

    def blank(self, where: Range) -> None:
        """Note that these bytes are new and hold nothing."""
        storage, start, end = where
        if start < end:
            self._segments[storage] = [_Segment(start, end, None, {}, blank=True)]

    def blank_rest(self, where: Range) -> None:
        """Note that of these bytes those that nothing has touched hold nothing."""
        for segment in self._touch(where):
            segment.blank = segment.blank or (segment.write is None and not segment.reads)

    def read(self, entry: Entry, clock: Clock, where: Range) -> None:
        """Check and note that `entry`, before which `clock` is ordered, reads these bytes.

        Raises:
            RaceError: they may still be being written, or never were.
        """
        for segment in self._touch(where):
            if segment.blank:
                place = self._describe((where[0], segment.start, segment.end))
                raise RaceError(f"{entry} reads {place}, which nothing has written")
            write = segment.write
            if write is not None and clock.get(write.stream.index, 0) < write.epoch:
                raise self._race(entry, "reads", segment, where[0], write, "may still be writing")
            segment.reads[entry.stream.index] = entry

    def write(self, entry: Entry, clock: Clock, where: Range) -> None:
        """Check and note that `entry`, before which `clock` is ordered, writes these bytes.

        Raises:
            RaceError: they may still be being read or written.
        """
        storage, start, end = where
        touched = self._touch(where)
        for segment in touched:
            write = segment.write
            if write is not None and clock.get(write.stream.index, 0) < write.epoch:
                raise self._race(entry, "writes", segment, storage, write, "may still be writing")
            for read in segment.reads.values():
                if clock.get(read.stream.index, 0) < read.epoch:
                    raise self._race(entry, "writes", segment, storage, read, "may still be reading")
        if len(touched) == 1:
            touched[0].write = entry
            touched[0].reads = {}
            touched[0].blank = False
        elif touched:
            segments = self._segments[storage]
            first = bisect_left(segments, start, key=_start)
            segments[first : first + len(touched)] = [_Segment(start, end, entry, {})]

    def _touch(self, where: Range) -> list[_Segment]:
        """Split the storage's segments so that some of them cover exactly these bytes, and return those."""
        storage, start, end = where
        if start >= end:
            return []
        segments = self._segments.get(storage)
        if segments is None:
            segments = self._segments[storage] = []
        first = bisect_right(segments, start, key=_start) - 1
        if first >= 0 and segments[first].start == start and segments[first].end == end:
            return [segments[first]]
        self._split(segments, start)
        self._split(segments, end)
        first = bisect_left(segments, start, key=_start)
        last = bisect_left(segments, end, key=_start)
        covered: list[_Segment] = []
        position = start
        for segment in segments[first:last]:
            if segment.start > position:
                covered.append(_Segment(position, segment.start, None, {}))
            covered.append(segment)
            position = segment.end
        if position < end:
            covered.append(_Segment(position, end, None, {}))
        segments[first:last] = covered
        return covered

    @staticmethod
    def _split(segments: list[_Segment], at: int) -> None:
        index = bisect_right(segments, at, key=_start) - 1
        if index >= 0 and segments[index].start < at < segments[index].end:
            old = segments[index]
            segments.insert(index + 1, _Segment(at, old.end, old.write, dict(old.reads), old.blank))
            old.end = at

    def _race(self, entry: Entry, verb: str, segment: _Segment, storage: int, other: Entry, state: str) -> RaceError:
        place = self._describe((storage, segment.start, segment.end))
        return RaceError(f"{entry} {verb} {place}, which {other} {state}: nothing orders the two")


def _start(segment: _Segment) -> int:
    return segment.start
