"""The trace is what a viewer expects, and its slices add up to the step report."""

import json
from collections import defaultdict

import pytest
import torch

from offload.virtual import VirtualDevice

NS = 1e-9


@pytest.fixture(scope="module")
def device():
    """Two layers take turns in one slot, so that compute stalls and copies wait, in every step."""
    device = VirtualDevice("h200-pcie5")
    host = device.allocate_host(1 << 16)
    slot, side = device.allocate_device(1 << 15), device.new_stream()
    arrived, free = device.new_event(), device.new_event()
    with device.active():
        for _ in range(3):
            x = device.from_host([1.0] * 128, torch.float32)
            for layer in range(2):
                device.enter_layer(layer)
                device.wait(free, side)
                device.copy(slot, host[layer << 15 : (layer + 1) << 15], side)
                device.record(arrived, side)
                device.wait(arrived)
                x = x @ slot.view(torch.float32)[: 128 * 32].view(128, 32) @ torch.ones(32, 128)
                device.record(free)
            device.enter_layer(None)
            device.to_host(x)
            device.mark_step("tg")
    return device


@pytest.fixture(scope="module")
def events(device):
    trace = json.loads(json.dumps(device.timeline()))
    assert trace["displayTimeUnit"] == "ms"
    return trace["traceEvents"]


def tracks(events):
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[names[event["tid"]]].append(event)
    return slices


def test_every_event_has_what_its_kind_needs(events):
    needed = {
        "X": {"name", "pid", "tid", "ts", "dur", "args"},
        "M": {"name", "pid", "args"},
        "C": {"name", "pid", "ts", "args"},
    }
    assert {event["ph"] for event in events} == set(needed)
    for event in events:
        assert needed[event["ph"]] <= set(event)
        if event["ph"] == "X":
            assert event["dur"] > 0 and event["ts"] >= 0
            assert round(event["ts"], 3) == event["ts"]
        if event["ph"] == "C":
            assert all(value >= 0 for value in event["args"].values())


def test_the_simulated_device_is_named(events, device):
    [process] = [event for event in events if event["name"] == "process_name"]
    assert process["args"]["name"] == f"{device.name} (simulated)"


def test_tracks(events):
    assert {
        "steps",
        "compute: layers",
        "compute: operators",
        "compute: stalls",
        "copy: layers",
        "copy: operators",
        "copy: waits",
        "bus",
        "idle",
    } <= set(tracks(events))


def test_slices_of_a_track_do_not_overlap(events):
    for name, slices in tracks(events).items():
        slices.sort(key=lambda event: event["ts"])
        for before, after in zip(slices, slices[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-9, name


def test_slices_add_up_to_the_report(events, device):
    reports = device.step_reports()
    found = tracks(events)
    stalled = sum(event["args"]["length_ps"] for event in found["compute: stalls"])
    assert stalled > 0
    assert stalled == pytest.approx(sum(report.stall_s for report in reports) * 1e12)
    lost = defaultdict(float)
    for event in found["idle"]:
        lost[event["name"]] += event["args"]["lost_ps"] / 1e12
    expected = defaultdict(float)
    for report in reports:
        for cause, seconds in report.idle_s.items():
            expected[cause] += seconds
    # Slices shorter than a nanosecond are left out of the trace.
    assert set(lost) <= set(expected)
    for cause, seconds in expected.items():
        assert lost[cause] == pytest.approx(seconds, abs=len(found["idle"]) * NS)
    assert [event["name"] for event in found["steps"]] == ["tg"] * 3
    for event, report in zip(found["steps"], reports, strict=True):
        assert event["dur"] == pytest.approx(report.step_s * 1e6, abs=1e-3)


def test_operators_carry_their_layer_and_bytes(events):
    copies = tracks(events)["copy: operators"]
    assert [event["args"]["layer"] for event in copies] == [0, 1] * 3
    assert all(event["args"]["ce_bytes"] == 1 << 15 for event in copies)


def test_counters_follow_the_rates(events, device):
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "bus GB/s"]
    assert {round(event["args"]["copies"]) for event in counters} == {0, 55}
    assert all(event["args"]["kernel loads"] == 0 for event in counters)


def test_the_bus_track_carries_every_copy(events):
    slices = tracks(events)["bus"]
    assert {event["name"] for event in slices} == {"copies"}
    assert sum(event["args"]["bytes"] for event in slices) == 6 << 15
