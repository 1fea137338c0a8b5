"""Why a resource was idle: every interval in which it could have worked and did not, with the cause.

The cause is read from the stream whose operator uses the resource next: that operator is starting (*launch*), its
stream works on something else (*other work on the stream*), waits for a slot to be read (*slot not free*), for a copy
(*stall*), for the streams to meet (*join*), or is empty, because the host is still issuing (*issued late*) or waits
(*nothing queued*). A resource that works, but slower than it could, is *below full rate*.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from offload.bound import Rates, Resource
from offload.virtual.clocks import Entry
from offload.virtual.simulate import Segment, Simulator

CAUSES = (
    "slot not free",
    "issued late",
    "nothing queued",
    "join",
    "launch",
    "other work on the stream",
    "below full rate",
    "stall",
)
_DEMANDS: dict[Resource, tuple[str, ...]] = {
    "kernel loads": ("sm",),
    "copies": ("ce",),
    "bus": ("sm", "ce"),
    "device memory": ("hbm",),
    "FLOPs": ("flops",),
}


@dataclass(frozen=True)
class Interval:
    """A stretch of time with its cause.

    Attributes:
        start_ps, end_ps: when.
        cause: one of `CAUSES`.
        idle_ps: how much of the binding resource's time was lost; less than the length while it works below full rate.
        layer: of the operator that was waited for.
    """

    start_ps: int
    end_ps: int
    cause: str
    idle_ps: Fraction | int
    layer: int | None


def idle_intervals(
    simulator: Simulator, window: list[Segment], host_waits: list[tuple[int, int]], resource: Resource, rates: Rates
) -> tuple[Interval, ...]:
    """Every interval of a window in which a resource lost time.

    Args:
        simulator: has passed the window.
        window: its segments.
        host_waits: when the host waited for the device, in order.
        resource: the one that sets the bound.
        rates: of the hardware.
    """
    return tuple(_joined(_idle(simulator, window, host_waits, resource, rates)))


def _idle(
    simulator: Simulator, window: list[Segment], host_waits: list[tuple[int, int]], resource: Resource, rates: Rates
) -> Iterator[Interval]:
    demands = _DEMANDS[resource]
    rate = {
        "kernel loads": rates.sm_bytes_per_s,
        "copies": rates.ce_bytes_per_s,
        "bus": rates.bus_bytes_per_s,
        "device memory": rates.hbm_bytes_per_s,
        "FLOPs": rates.flops_per_s,
    }[resource]
    finder = _Next(simulator.log, demands, window[0].start_ps if window else 0)
    for segment in window:
        work = sum(getattr(segment, field) for field in demands)
        length_ps = segment.end_ps - segment.start_ps
        missing = length_ps * rate - work
        if missing <= 0:
            continue
        if work:
            lost = Fraction(missing, rate)
            yield Interval(segment.start_ps, segment.end_ps, "below full rate", lost, finder.working(segment.start_ps))
            continue
        cause, layer = finder.cause(segment.start_ps)
        if cause != "empty":
            yield Interval(segment.start_ps, segment.end_ps, cause, length_ps, layer)
            continue
        for start, end, waiting in _split(segment.start_ps, segment.end_ps, host_waits):
            yield Interval(start, end, "nothing queued" if waiting else "issued late", end - start, layer)


def _split(start_ps: int, end_ps: int, host_waits: list[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """Cut an interval where the host begins or ceases to wait."""
    index = bisect_right(host_waits, start_ps, key=lambda wait: wait[1])
    while start_ps < end_ps:
        begin, finish = host_waits[index] if index < len(host_waits) else (end_ps, end_ps)
        if start_ps < begin:
            cut = min(begin, end_ps)
            yield start_ps, cut, False
        else:
            cut = min(finish, end_ps)
            yield start_ps, cut, True
            index += 1
        start_ps = cut


class _Next:
    """Walks the streams forward in time to find who uses a resource next.

    Args:
        log: per stream, its entries in order.
        demands: what counts as using the resource.
        start_ps: where the walk begins.
    """

    def __init__(self, log: list[list[Entry]], demands: tuple[str, ...], start_ps: int) -> None:
        self._log = log
        self._demands = demands
        self._heads = [_first_after(entries, start_ps) for entries in log]
        self._users = list(self._heads)
        self._recent = self._latest_user()

    def working(self, time_ps: int) -> int | None:
        """Layer of the operator that uses the resource now."""
        user = self._user(time_ps)
        return user.layer if user else None

    def cause(self, time_ps: int) -> tuple[str, int | None]:
        """Why the next user of the resource does not use it yet, and its layer; "empty" if its stream is.

        Where no user was issued so far, its stream is taken to be that of the latest one.
        """
        user = self._user(time_ps)
        stream = user.stream.index if user else self._recent
        if stream < 0:
            return "empty", None
        entries, index = self._log[stream], self._heads[stream]
        while index < len(entries) and 0 <= entries[index].finish_ps <= time_ps:
            index += 1
        self._heads[stream] = index
        layer = user.layer if user else None
        if index == len(entries) or entries[index].start_ps < 0 or entries[index].start_ps > time_ps:
            return "empty", layer
        if entries[index].kind == "wait":
            return entries[index].reason, layer
        return ("launch" if entries[index] is user else "other work on the stream"), layer

    def _user(self, time_ps: int) -> Entry | None:
        found: Entry | None = None
        for stream, entries in enumerate(self._log):
            index = self._users[stream]
            while index < len(entries) and not self._is_user(entries[index], time_ps):
                index += 1
            self._users[stream] = index
            if index < len(entries) and (found is None or _flows(entries[index]) < _flows(found)):
                found = entries[index]
        if found is not None:
            self._recent = found.stream.index
        return found

    def _latest_user(self) -> int:
        """Index of the stream that used the resource last before the walk begins, -1 if none did."""
        latest, stream = -1, -1
        for index, entries in enumerate(self._log):
            before = (entry for entry in reversed(entries[: self._heads[index]]) if self._uses(entry))
            if (entry := next(before, None)) is not None and entry.flow_ps > latest:
                latest, stream = entry.flow_ps, index
        return stream

    def _is_user(self, entry: Entry, time_ps: int) -> bool:
        return not 0 <= entry.finish_ps <= time_ps and self._uses(entry)

    def _uses(self, entry: Entry) -> bool:
        return any(entry.demands.get(name) for name in self._demands)


def _first_after(entries: list[Entry], time_ps: int) -> int:
    """Index of the first entry that is not done at `time_ps`."""
    return bisect_left(entries, True, key=lambda entry: entry.finish_ps < 0 or entry.finish_ps > time_ps)


def _flows(entry: Entry) -> tuple[int, int]:
    """Order of use: those that began by the moment their bytes flow, the others after them as they were issued."""
    return (0, entry.flow_ps) if entry.flow_ps >= 0 else (1, entry.issue_ps)


def _joined(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Neighbours with the same cause and layer as one."""
    last: Interval | None = None
    for interval in intervals:
        here = (interval.start_ps, interval.cause, interval.layer)
        if last is not None and (last.end_ps, last.cause, last.layer) == here:
            idle_ps = last.idle_ps + interval.idle_ps
            last = Interval(last.start_ps, interval.end_ps, last.cause, idle_ps, last.layer)
            continue
        if last is not None:
            yield last
        last = interval
    if last is not None:
        yield last
