"""What a step took and why: its bound, and every interval in which the binding resource was idle, with the cause.

A step is a window of simulated time. The bound follows from the work that was done in the window, so that `step =
bound + idle` holds exactly, in integers, and no step is ever shorter than its bound. In steady state the work done in
a step is the work issued in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from offload.bound import Bound, Rates, Traffic, bound
from offload.virtual.clocks import Entry, VirtualStream
from offload.virtual.idle import CAUSES, Interval, idle_intervals
from offload.virtual.profiles import PICOSECONDS_PER_S, Profile
from offload.virtual.simulate import Segment, Simulator


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
    idle = idle_intervals(simulator, window, host_waits, limit.resource, rates)
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


def _stalls(entries: list[Entry], begin_ps: int, end_ps: int) -> Iterator[Interval]:
    for entry in entries:
        if entry.kind == "wait" and entry.reason == "stall" and entry.start_ps >= 0:
            start = max(entry.start_ps, begin_ps)
            end = min(entry.finish_ps, end_ps) if entry.finish_ps >= 0 else end_ps
            if start < end:
                yield Interval(start, end, "stall", end - start, entry.layer)
