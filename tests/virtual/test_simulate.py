"""Two-stream toy programs whose times were computed by hand; they must agree to the picosecond."""

import pytest

from offload.virtual.simulate import water_fill
from tests.virtual.conftest import PER_PS
from tests.virtual.programs import Program


def spans(*entries):
    return [(entry.start_ps, entry.flow_ps, entry.finish_ps) for entry in entries]


def test_one_kernel(toy):
    # Issued at 1, launched at 6; 100 bytes over the bus at 1 byte/ps last longer than 200 of device memory at 10.
    program = Program(toy())
    kernel = program.kernel(sm=100, hbm=200)
    program.run()
    assert spans(kernel) == [(1, 6, 106)]


def test_roofline_takes_the_slowest_resource(toy):
    program = Program(toy())
    bus, memory, flops = program.kernel(sm=10, hbm=1), program.kernel(hbm=305), program.kernel(flops=50, hbm=10)
    program.run()
    # The second waits for the first (16) and its last tenth of a picosecond is rounded up: 21 + 31.
    assert spans(bus, memory, flops) == [(1, 6, 16), (16, 21, 52), (52, 57, 107)]


def test_kernel_and_copy_share_the_bus_evenly(toy):
    # The copy flows from 5, alone at 2 bytes/ps until the kernel's loads begin at 6; then 1 byte/ps each.
    program = Program(toy())
    kernel, copy = program.kernel(sm=100), program.copy(ce=100)
    program.run()
    assert spans(kernel, copy) == [(1, 6, 106), (2, 5, 104)]


def test_what_a_capped_flow_leaves_goes_to_the_other(toy):
    # ce = 3: the kernel is capped at 1, the copy gets 2; 3 bytes at 5..6, then 97 at 2 bytes/ps: 48.5, so 49.
    program = Program(toy(ce_bytes_per_s=3 * PER_PS))
    kernel, copy = program.kernel(sm=100), program.copy(ce=100)
    program.run()
    assert spans(kernel, copy) == [(1, 6, 106), (2, 5, 55)]


def test_a_later_kernel_slows_an_earlier_copy(toy):
    # The copy alone would end at 4 + 50 = 54. The kernel flows from 24: 60 bytes are left then, at 1 byte/ps.
    program = Program(toy())
    copy = program.copy(ce=100)
    program.issuer.spend(17)
    kernel = program.kernel(sm=1000)
    program.run()
    assert spans(copy, kernel) == [(1, 4, 84), (19, 24, 1024)]


def test_a_stream_waits_for_another(toy):
    # Compute 1..26, the copy waits for it and flows at 29, the next kernel waits for the copy.
    program = Program(toy())
    first = program.kernel(flops=20)
    program.order(program.issuer.compute, program.copy_stream)
    copy = program.copy(ce=100)
    program.order(program.copy_stream, program.issuer.compute)
    second = program.kernel(flops=20)
    program.run()
    assert spans(first, copy, second) == [(1, 6, 26), (26, 29, 79), (79, 84, 104)]


def test_two_copies_share_what_one_may_take(toy):
    program = Program(toy())
    other = program.issuer.add_stream("copy 2")
    a = program.copy(ce=50)
    b = program.kernel(stream=other, ce=50)
    program.run()
    # a flows at 4, b at 7: 6 bytes alone, then 1 byte/ps each until a is done at 51; b's last 6 bytes at 2 bytes/ps.
    assert spans(a, b) == [(1, 4, 51), (2, 7, 54)]


def test_the_host_waits_for_what_it_reads_and_copies_go_on(toy):
    program = Program(toy())
    program.copy(ce=1000)
    kernel = program.kernel(flops=10)
    issuer = program.issuer
    issuer.let_host_wait(lambda: issuer.simulator.run_until(kernel), [issuer.compute])
    assert issuer.host_ps == kernel.finish_ps == 17
    late = program.kernel(sm=100)
    simulator = program.run()
    # 13 ps of the copy alone, then both at 1 byte/ps from 23: 1000 - 38 = 962 left, 862 when the kernel ends at 123.
    assert spans(late) == [(18, 23, 123)]
    assert simulator.drain() == 123 + 431


def test_zero_work_takes_no_time(toy):
    program = Program(toy(kernel_s=0))
    kernel = program.kernel(hbm=0)
    program.run()
    assert spans(kernel) == [(1, 1, 1)]


@pytest.mark.parametrize(
    ("groups", "total", "expected"),
    [
        ([("a", 1, 5)], 10, {"a": 5}),
        ([("a", 1, 5), ("b", 1, 20)], 10, {"a": 5, "b": 5}),
        ([("a", 1, 2), ("b", 1, 20)], 10, {"a": 2, "b": 8}),
        ([("a", 2, 20), ("b", 1, 20)], 10, {"a": 3, "b": 4}),
        ([("a", 2, 1), ("b", 2, 7)], 10, {"a": 1, "b": 4}),
        ([], 10, {}),
    ],
    ids=["alone", "even", "capped", "rounded", "groups", "nobody"],
)
def test_water_filling(groups, total, expected):
    assert water_fill(groups, total) == expected


def test_the_past_has_no_gaps(toy):
    program = Program(toy())
    program.kernel(sm=33, hbm=7)
    program.copy(ce=45, hbm=45)
    program.issuer.spend(100)
    program.kernel(flops=3)
    segments = program.run().segments
    assert segments[0].start_ps == 0
    assert all(before.end_ps == after.start_ps for before, after in zip(segments, segments[1:], strict=False))
    totals = [sum(getattr(segment, name) for segment in segments) for name in ("sm", "ce", "hbm", "flops")]
    assert totals == [33 * PER_PS, 45 * PER_PS, 52 * PER_PS, 3 * PER_PS]
