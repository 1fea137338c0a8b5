"""Races are seen from order alone: tokens would be right in every one of these programs."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.virtual import RaceError, StampError, VirtualDevice
from offload.virtual.clocks import VirtualEvent
from offload.virtual.issue import Operation
from tests.virtual.programs import Program

N = 64


class Rig:
    """A device, a host buffer, two slots in one allocation, and a copy stream."""

    def __init__(self, profile):
        self.device = VirtualDevice(profile)
        self.host = self.device.allocate_host(N)
        both = self.device.allocate_device(2 * N)
        self.slots = both[:N], both[N:]
        self.side = self.device.new_stream()

    def onload(self, slot=0, layer=3):
        self.device.enter_layer(layer)
        self.device.copy(self.slots[slot], self.host, self.side)
        self.device.stamp(self.slots[slot], layer)

    def read(self, slot=0, layer=3):
        self.device.enter_layer(layer)
        with self.device.active():
            return self.slots[slot] + 1

    def order(self, before, after):
        event = self.device.new_event()
        self.device.record(event, before)
        self.device.wait(event, after)


@pytest.fixture
def rig(toy):
    return Rig(toy())


def test_ordered_by_events(rig):
    rig.onload()
    rig.order(rig.side, None)
    rig.read()
    rig.order(None, rig.side)
    rig.onload()


def test_read_of_a_copy_that_nothing_waited_for(rig):
    rig.onload()
    expected = (
        "'add' of layer 3 on stream 'compute' reads bytes 0..64 of slot 0 (layer 3), which 'copy' of layer 3 "
        "on stream 'copy' may still be writing"
    )
    with pytest.raises(RaceError, match=re.escape(expected)):
        rig.read()


def test_copy_into_a_slot_that_is_still_read(rig):
    rig.onload()
    rig.order(rig.side, None)
    rig.read()
    with pytest.raises(
        RaceError, match="'copy' of layer 5 .* writes .* slot 0 .* 'add' of layer 3 .* still be reading"
    ):
        rig.onload(layer=5)


def test_an_event_recorded_too_early_orders_nothing(rig):
    event = rig.device.new_event()
    rig.device.record(event, rig.side)
    rig.onload()
    rig.device.wait(event)
    with pytest.raises(RaceError, match="may still be writing"):
        rig.read()


def test_an_event_never_recorded_orders_nothing(rig):
    rig.onload()
    rig.device.wait(rig.device.new_event())
    with pytest.raises(RaceError):
        rig.read()


def test_order_is_transitive(rig):
    third = rig.device.new_stream()
    rig.onload()
    rig.order(rig.side, third)
    rig.order(third, None)
    rig.read()


def test_the_host_orders_what_it_waited_for(rig):
    rig.onload()
    rig.device.synchronise()
    rig.read()
    rig.device.synchronise()
    rig.onload()


def test_reading_a_token_does_not_wait_for_the_copy_stream(rig):
    rig.onload()
    rig.device.to_host(rig.device.from_host([1]))
    with pytest.raises(RaceError):
        rig.read()


def test_a_stream_made_after_a_wait_knows_of_it(rig):
    rig.read()
    rig.device.synchronise()
    rig.side = rig.device.new_stream()
    rig.onload()


def test_neighbours_in_one_allocation_do_not_race(rig):
    rig.onload(slot=0)
    rig.read(slot=1)


def test_half_of_a_range_races(rig):
    rig.onload(slot=0)
    with rig.device.active(), pytest.raises(RaceError, match="bytes 32..64 of slot 0"):
        rig.slots[0][32:] + 1


def test_a_read_is_remembered_after_another_streams_read(rig):
    rig.read()
    other = rig.device.allocate_device(N)
    rig.device.copy(other, rig.slots[0], rig.side)
    third = rig.device.new_stream()
    rig.order(rig.side, third)
    with pytest.raises(RaceError, match="'add' .* may still be reading"):
        rig.device.copy(rig.slots[0], rig.host, third)


def test_memory_that_died_takes_its_history_along(rig):
    for _ in range(20):
        temporary = rig.device.allocate_device(N)
        rig.device.copy(temporary, rig.host, rig.side)
        del temporary
        with rig.device.active():
            torch.zeros(N)


def test_stamps_see_a_wrong_layer_that_is_no_race(rig):
    rig.onload(layer=3)
    rig.order(rig.side, None)
    rig.device.check_stamp(rig.slots[0], 3)
    with pytest.raises(StampError, match=r"layer 5 is about to read slot 0 \(layer 3\), but it contains layer 3"):
        rig.device.check_stamp(rig.slots[0], 5)
    with pytest.raises(StampError, match="nothing was copied"):
        rig.device.check_stamp(rig.slots[1], 5)


def test_a_copy_belongs_to_the_layer_that_it_brings(rig):
    rig.device.enter_layer(3)
    rig.device.copy(rig.slots[0], rig.host, rig.side)
    rig.device.stamp(rig.slots[0], 7)
    with pytest.raises(RaceError, match="'copy' of layer 7 on stream 'copy' may still be writing"):
        rig.read(layer=7)


def test_memory_that_nothing_has_written(rig):
    with rig.device.active():
        fresh = torch.empty(8)
        fresh[:4].fill_(1)
        fresh[:4] + 1
        with pytest.raises(RaceError, match="'add' .* reads bytes 16..32 of activations, which nothing has written"):
            fresh + 1
        fresh[4:].copy_(fresh[:4])
        fresh + 1


def test_a_slot_holds_only_what_was_copied_into_it(rig):
    rig.device.copy(rig.slots[0][:40], rig.host[:40], rig.side)
    rig.device.stamp(rig.slots[0], 3)
    rig.order(rig.side, None)
    with rig.device.active():
        rig.slots[0][:40] + 1
        with pytest.raises(RaceError, match="reads bytes 40..64 of slot 0 .layer 3., which nothing has written"):
            rig.slots[0] + 1
    rig.order(None, rig.side)
    rig.onload()
    rig.order(rig.side, None)
    rig.read()


# -- any program, against a search through all pairs -----------------------------------------------------------------

BYTES = st.tuples(st.integers(0, 9), st.integers(1, 6)).map(lambda pair: (1, pair[0], pair[0] + pair[1]))
STREAMS = EVENTS = st.integers(0, 2)
PROGRAMS = st.lists(
    st.one_of(
        st.tuples(st.just("work"), STREAMS, st.lists(BYTES, max_size=1), st.lists(BYTES, max_size=1)),
        st.tuples(st.sampled_from(["record", "wait"]), STREAMS, EVENTS),
        st.just(("synchronise",)),
    ),
    max_size=40,
)


def overlap(some, others):
    return any(max(a[1], b[1]) < min(a[2], b[2]) for a in some for b in others)


@given(program=PROGRAMS)
@settings(max_examples=400, deadline=None)
def test_a_race_is_a_pair_that_nothing_orders(toy, program):
    run = Program(toy())
    streams = [run.issuer.compute, run.copy_stream, run.issuer.add_stream("copy 2")]
    events, recorded = [VirtualEvent() for _ in range(3)], {}
    done, before = [], [frozenset()] * 3  # what was issued; what is ordered before the next of each stream
    for what, *arguments in program:
        if what == "work":
            stream, reads, writes = arguments
            races = any(
                overlap(reads, written) or overlap(writes, written) or overlap(writes, read)
                for index, (read, written) in enumerate(done)
                if index not in before[stream]
            )
            operation = Operation("kernel", "kernel", None, 0, {}, reads, writes)
            if races:
                with pytest.raises(RaceError):
                    run.issuer.enqueue(operation, streams[stream])
                return
            run.issuer.enqueue(operation, streams[stream])
            before[stream] |= {len(done)}
            done.append((reads, writes))
        elif what == "record":
            stream, event = arguments
            run.issuer.record(events[event], streams[stream])
            recorded[event] = before[stream]
        elif what == "wait" and arguments[1] in recorded:
            stream, event = arguments
            run.issuer.wait(events[event], streams[stream], None, "stall")
            before[stream] |= recorded[event]
        elif what == "synchronise":
            run.run()
            before = [frozenset(range(len(done)))] * 3
