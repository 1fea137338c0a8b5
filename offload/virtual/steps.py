"""What a step took and why: its bound, and every interval in which the binding resource was idle, with the cause.

A step is a window of simulated time. The bound follows from the work that was done in the window, so that `step =
bound + idle` holds exactly, in integers, and no step is ever shorter than its bound. In steady state the work done in
a step is the work issued in it.

The cause of an idle interval is read from the stream whose operator uses the resource next: that operator is starting
(*launch*), its stream works on something else (*other work on the stream*), waits for a slot to be read (*slot not
free*), for a copy (*stall*), for the streams to meet (*join*), or is empty, because the host is still issuing
(*issued late*) or waits (*nothing queued*). A resource that works, but slower than it could, is *below full rate*.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from offload.bound import Bound, Rates, Resource, Traffic, bound
from offload.virtual.clocks import Entry, VirtualStream
from offload.virtual.profiles import PICOSECONDS_PER_S, Profile
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
    idle_ps: Fraction
    layer: int | None


@dataclass(frozen=True)
class StepReport:
    """One step.

    Attributes:
        name: as it was marked.
        start_s, step_s: when it began and how long it took.
        bound: least time for the same work, and the resource that sets it (`bound.bound_s`, exact).
        idle_s: seconds that the binding resource lost, by cause; with the bound they add up to `step_s`.
        stall_s: compute waited for copies; stall_by_layer_s: the same, by the layer that waited.
        bus_bytes, bus_bytes_per_s: over the bus in the step.
        traffic: all bytes and FLOPs of the step.
        idle, stalls: the intervals themselves.
    """

    name: str
    start_s: float
    step_s: float
    bound: Bound
    idle_s: dict[str, float]
    stall_s: float
    stall_by_layer_s: dict[int | None, float]
    bus_bytes: int
    bus_bytes_per_s: float
    traffic: Traffic
    idle: tuple[Interval, ...]
    stalls: tuple[Interval, ...]

    @property
    def share_of_bound(self) -> float:
        return float(self.bound.bound_s) / self.step_s if self.step_s else 1.0


def rates_of(profile: Profile) -> Rates:
    """A profile's rates, as `bound` wants them."""
    return Rates(profile.sm_bytes_per_s, profile.ce_bytes_per_s, profile.hbm_bytes_per_s, profile.half_flops_per_s)


def report_step(
    simulator: Simulator,
    host_waits: list[tuple[int, int]],
    profile: Profile,
    compute: VirtualStream,
    name: str,
    begin_ps: int,
    end_ps: int,
) -> StepReport:
    """Report the window `begin_ps..end_ps`, which the simulation has passed.

    Args:
        host_waits: when the host waited for the device, in order.
        compute: the stream whose waits are stalls.
    """
    window = _window(simulator.segments, begin_ps, end_ps)
    totals = {field: sum(getattr(segment, field) for segment in window) for field in ("sm", "ce", "hbm", "flops")}
    traffic = Traffic(*(Fraction(totals[field], PICOSECONDS_PER_S) for field in ("sm", "ce", "hbm", "flops")))
    rates = rates_of(profile)
    limit = bound(traffic, rates)
    idle = tuple(_joined(_idle(simulator, window, host_waits, limit.resource, rates)))
    stalls = tuple(_stalls(simulator.log[compute.index] if simulator.log else [], begin_ps, end_ps))
    causes = dict.fromkeys(CAUSES, Fraction(0))
    for interval in idle:
        causes[interval.cause] += interval.idle_ps
    by_layer: dict[int | None, float] = {}
    for interval in stalls:
        by_layer[interval.layer] = by_layer.get(interval.layer, 0.0) + float(interval.idle_ps) / PICOSECONDS_PER_S
    step_s = (end_ps - begin_ps) / PICOSECONDS_PER_S
    return StepReport(
        name=name,
        start_s=begin_ps / PICOSECONDS_PER_S,
        step_s=step_s,
        bound=limit,
        idle_s={cause: float(lost) / PICOSECONDS_PER_S for cause, lost in causes.items() if lost},
        stall_s=sum(by_layer.values()),
        stall_by_layer_s=by_layer,
        bus_bytes=round(traffic.bus_bytes),
        bus_bytes_per_s=float(traffic.bus_bytes) / step_s if step_s else 0.0,
        traffic=traffic,
        idle=idle,
        stalls=stalls,
    )


def _window(segments: list[Segment], begin_ps: int, end_ps: int) -> list[Segment]:
    """The segments of a window; a mark always ends one."""
    first = bisect_right(segments, begin_ps, key=lambda segment: segment.end_ps)
    last = bisect_right(segments, end_ps, key=lambda segment: segment.end_ps)
    return segments[first:last]


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
        lost = Fraction((segment.end_ps - segment.start_ps) * rate - work, 1) / rate
        if lost <= 0:
            continue
        if work:
            yield Interval(segment.start_ps, segment.end_ps, "below full rate", lost, finder.working(segment.start_ps))
            continue
        cause, layer = finder.cause(segment.start_ps)
        if cause != "empty":
            yield Interval(segment.start_ps, segment.end_ps, cause, lost, layer)
            continue
        for start, end, waiting in _split(segment.start_ps, segment.end_ps, host_waits):
            yield Interval(start, end, "nothing queued" if waiting else "issued late", Fraction(end - start), layer)


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


def _stalls(entries: list[Entry], begin_ps: int, end_ps: int) -> Iterator[Interval]:
    for entry in entries:
        if entry.kind == "wait" and entry.reason == "stall" and entry.start_ps >= 0:
            start = max(entry.start_ps, begin_ps)
            end = min(entry.finish_ps, end_ps) if entry.finish_ps >= 0 else end_ps
            if start < end:
                yield Interval(start, end, "stall", Fraction(end - start), entry.layer)


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

    def working(self, time_ps: int) -> int | None:
        """Layer of the operator that uses the resource now."""
        user = self._user(time_ps)
        return user.layer if user else None

    def cause(self, time_ps: int) -> tuple[str, int | None]:
        """Why the next user of the resource does not use it yet, and its layer; "empty" if its stream is."""
        user = self._user(time_ps)
        if user is None:
            return "empty", None
        entries, index = self._log[user.stream.index], self._heads[user.stream.index]
        while 0 <= entries[index].finish_ps <= time_ps:
            index += 1
        self._heads[user.stream.index] = index
        head = entries[index]
        if head.start_ps < 0 or head.start_ps > time_ps:
            return "empty", user.layer
        if head.kind == "wait":
            return head.reason, user.layer
        return ("launch" if head is user else "other work on the stream"), user.layer

    def _user(self, time_ps: int) -> Entry | None:
        found: Entry | None = None
        for stream, entries in enumerate(self._log):
            index = self._users[stream]
            while index < len(entries) and not self._is_user(entries[index], time_ps):
                index += 1
            self._users[stream] = index
            if index < len(entries) and (found is None or _flows(entries[index]) < _flows(found)):
                found = entries[index]
        return found

    def _is_user(self, entry: Entry, time_ps: int) -> bool:
        is_over = 0 <= entry.finish_ps <= time_ps
        return not is_over and any(entry.demands.get(name) for name in self._demands)


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
            last = replace(last, end_ps=interval.end_ps, idle_ps=last.idle_ps + interval.idle_ps)
            continue
        if last is not None:
            yield last
        last = interval
    if last is not None:
        yield last
