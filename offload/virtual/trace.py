"""The timeline as a Chrome trace, which Perfetto opens: one track per kind, counters for the rates.

Slices of one track never overlap. Times are in microseconds with three decimals; a slice carries its exact length,
and what was lost in it, in its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from offload.virtual.clocks import Entry, VirtualStream
from offload.virtual.profiles import PICOSECONDS_PER_S
from offload.virtual.simulate import Segment, Simulator
from offload.virtual.steps import StepReport

_NS = 1000
"""Picoseconds in a nanosecond."""


def chrome_trace(
    title: str, simulator: Simulator, streams: Sequence[VirtualStream], reports: Sequence[StepReport]
) -> dict[str, Any]:
    """Build the trace of everything that was simulated.

    Args:
        title: name of the process in the viewer.
        simulator: everything in it is done.
        streams: names of the tracks.
        reports: the marked steps, whose idle and stall intervals become tracks of their own.

    Returns:
        `{"traceEvents": [...]}` with ts and dur in microseconds.
    """
    tracks: list[tuple[str, Iterable[dict[str, Any]]]] = [("steps", map(_step, reports))]
    for stream in streams:
        entries = simulator.log[stream.index] if stream.index < len(simulator.log) else []
        worked = [entry for entry in entries if entry.kind != "wait"]
        tracks.append((f"{stream.name}: layers", _layers(worked)))
        tracks.append((f"{stream.name}: operators", map(_operator, worked)))
        tracks.append((f"{stream.name}: waits", map(_wait, (entry for entry in entries if entry.kind == "wait"))))
    tracks.append(("compute: stalls", (_interval(i) for report in reports for i in report.stalls)))
    tracks.append(("bus", _bus(simulator.segments)))
    tracks.append(("idle", (_interval(i) for report in reports for i in report.idle)))
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{title} (simulated)"}}
    ]
    for tid, (name, slices) in enumerate(tracks, start=1):
        shown = [{**one, "ph": "X", "pid": 1, "tid": tid} for one in slices if one["dur"] > 0]
        if shown:
            events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}})
            events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
            events += shown
    events += _counters(simulator.segments)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(name: str, start_ps: int, end_ps: int, **arguments: Any) -> dict[str, Any]:
    start, end = start_ps // _NS, end_ps // _NS
    return {
        "name": name,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": {"length_ps": end_ps - start_ps, **arguments},
    }


def _operator(entry: Entry) -> dict[str, Any]:
    units = {name: name if name == "flops" else f"{name}_bytes" for name in entry.demands}
    amounts = {units[name]: amount for name, amount in entry.demands.items() if amount}
    return _slice(entry.name, entry.start_ps, entry.finish_ps, layer=entry.layer, **amounts)


def _wait(entry: Entry) -> dict[str, Any]:
    return _slice(entry.reason, entry.start_ps, entry.finish_ps, layer=entry.layer)


def _layers(entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
    """One slice for each run of operators of one layer."""
    layer: int | None = None
    start_ps = end_ps = -1
    for entry in entries:
        if entry.layer != layer:
            if layer is not None:
                yield _slice(f"layer {layer}", start_ps, end_ps)
            layer, start_ps = entry.layer, entry.start_ps
        end_ps = entry.finish_ps
    if layer is not None:
        yield _slice(f"layer {layer}", start_ps, end_ps)


def _bus(segments: Iterable[Segment]) -> Iterator[dict[str, Any]]:
    """One slice for each stretch in which the same ways carry something."""
    name, start_ps, end_ps, work = "", 0, 0, 0
    for segment in segments:
        ways = [way for way, amount in (("copies", segment.ce), ("kernel loads", segment.sm)) if amount]
        if " + ".join(ways) != name:
            if name:
                yield _slice(name, start_ps, end_ps, bytes=work // PICOSECONDS_PER_S)
            name, start_ps, work = " + ".join(ways), segment.start_ps, 0
        end_ps = segment.end_ps
        work += segment.ce + segment.sm
    if name:
        yield _slice(name, start_ps, end_ps, bytes=work // PICOSECONDS_PER_S)


def _step(report: StepReport) -> dict[str, Any]:
    begin_ps = round(report.start_s * 1e12)
    arguments = {"bound_s": float(report.bound.bound_s), "set_by": report.bound.resource, "bus_bytes": report.bus_bytes}
    return _slice(report.name, begin_ps, begin_ps + round(report.step_s * 1e12), **arguments)


def _interval(interval: Any) -> dict[str, Any]:
    return _slice(
        interval.cause, interval.start_ps, interval.end_ps, layer=interval.layer, lost_ps=float(interval.idle_ps)
    )


def _counters(segments: Iterable[Segment]) -> Iterator[dict[str, Any]]:
    """Rates in GB/s, an event where they change."""
    shown: tuple[float, ...] = ()
    for segment in segments:
        length = segment.end_ps - segment.start_ps
        rates = tuple(round(work / length / 1e9, 3) for work in (segment.ce, segment.sm, segment.hbm))
        if rates != shown:
            shown = rates
            at = {"ph": "C", "pid": 1, "tid": 0, "ts": segment.start_ps // _NS / 1000}
            yield {**at, "name": "bus GB/s", "args": {"copies": rates[0], "kernel loads": rates[1]}}
            yield {**at, "name": "device memory GB/s", "args": {"GB/s": rates[2]}}
