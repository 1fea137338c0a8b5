"""step = bound + idle, exactly, with every idle interval explained."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.virtual import VirtualDevice
from offload.virtual.idle import CAUSES
from offload.virtual.profiles import PICOSECONDS_PER_S
from tests.virtual.conftest import PER_PS
from tests.virtual.programs import Program


def idle(report):
    """Picoseconds by cause, in the order of time, neighbours of one cause joined."""
    found = []
    for interval in report.idle:
        if found and found[-1][0] == interval.cause:
            found[-1] = (interval.cause, found[-1][1] + interval.idle_ps)
        else:
            found.append((interval.cause, interval.idle_ps))
    return found


def bound_ps(report):
    return report.bound.bound_s * PICOSECONDS_PER_S


def check(report, begin_ps, end_ps):
    """What must hold of every step."""
    assert bound_ps(report) + sum(interval.idle_ps for interval in report.idle) == end_ps - begin_ps
    assert {interval.cause for interval in report.idle} <= set(CAUSES)
    position = begin_ps
    for interval in report.idle:
        assert position <= interval.start_ps < interval.end_ps <= end_ps
        assert 0 < interval.idle_ps <= interval.end_ps - interval.start_ps
        position = interval.end_ps


def test_a_copy_that_waits_for_its_slot(toy):
    program = Program(toy())
    program.copy(layer=1, ce=100)
    program.kernel(layer=0, flops=100)
    program.order(program.issuer.compute, program.copy_stream, "slot not free")
    last = program.copy(layer=2, ce=100)
    program.wait_for(last)
    report = program.report(0, 160)
    check(report, 0, 160)
    # Copies flow 4..54 and 110..160; the kernel that holds the slot runs until 107.
    assert (report.bound.resource, bound_ps(report)) == ("copies", 100)
    assert idle(report) == [("issued late", 1), ("launch", 3), ("slot not free", 53), ("launch", 3)]
    assert report.idle[2].layer == 2
    assert report.bus_bytes == 200 and report.stall_s == 0


def test_compute_that_waits_for_its_copy(toy):
    program = Program(toy())
    program.copy(layer=7, ce=100)
    program.order(program.copy_stream, program.issuer.compute, "stall")
    last = program.kernel(layer=7, flops=100)
    program.wait_for(last)
    report = program.report(0, 159)
    check(report, 0, 159)
    # The copy is issued at 1 and done at 54, the kernel flows from 59. Compute waits from 1 on.
    assert (report.bound.resource, bound_ps(report)) == ("FLOPs", 100)
    assert idle(report) == [("issued late", 1), ("stall", 53), ("launch", 5)]
    assert report.stall_s == pytest.approx(53e-12)


def test_the_bus_has_nothing_to_carry_while_the_host_waits(toy):
    program = Program(toy())
    program.copy(ce=100)
    program.kernel(flops=45)
    program.wait_for(program.kernel(flops=4))
    report = program.report(0, 61)
    check(report, 0, 61)
    assert idle(report) == [("issued late", 1), ("launch", 3), ("nothing queued", 7)]


def test_the_bus_waits_for_resident_layers_on_the_same_stream(toy):
    program = Program(toy())
    program.kernel(flops=20)
    program.wait_for(program.kernel(sm=100))
    report = program.report(0, 131)
    check(report, 0, 131)
    assert report.bound.resource == "kernel loads"
    assert idle(report) == [("issued late", 1), ("other work on the stream", 25), ("launch", 5)]


def test_a_flow_below_the_full_rate(toy):
    # The bus carries 3 bytes/ps: the copy alone fills 2 of them for a picosecond, and its last one is not full.
    program = Program(toy(sm_bytes_per_s=3 * PER_PS))
    kernel = program.kernel(sm=300)
    program.copy(ce=100)
    program.wait_for(kernel)
    report = program.report(0, 139)
    check(report, 0, 139)
    assert report.bound.resource == "bus"
    third = Fraction(1, 3)
    assert idle(report) == [("issued late", 2), ("launch", 3), ("below full rate", 2 * third)]


def test_streams_that_meet(toy):
    program = Program(toy())
    program.kernel(flops=50)
    program.copy(ce=60)
    program.order(program.copy_stream, program.issuer.compute, "join")
    program.order(program.issuer.compute, program.copy_stream, "join")
    program.wait_for(program.kernel(hbm=1))
    last = program.copy(ce=60)
    program.run()
    report = program.report(0, last.finish_ps)
    check(report, 0, last.finish_ps)
    assert ("join", 56 - 35) in idle(report)


def test_late_issue(toy):
    program = Program(toy(issue_s=100e-12))
    program.kernel(flops=10)
    program.wait_for(program.kernel(flops=10))
    report = program.report(0, 215)
    check(report, 0, 215)
    assert idle(report) == [("issued late", 100), ("launch", 5), ("issued late", 85), ("launch", 5)]


def test_a_step_without_work_is_all_idle(toy):
    program = Program(toy())
    program.issuer.spend(10)
    report = program.report(0, 10)
    check(report, 0, 10)
    assert bound_ps(report) == 0 and report.bus_bytes == 0


def test_steps_follow_each_other(toy):
    device = VirtualDevice(toy())
    with pytest.raises(ValueError, match="no step was marked"):
        device.step_report()
    for name in ("pp", "tg", "tg"):
        device.to_host(device.from_host([1, 2]))
        device.mark_step(name)
    reports = device.step_reports()
    assert [report.name for report in reports] == ["pp", "tg", "tg"]
    ends = [report.start_s + report.step_s for report in reports]
    assert [report.start_s for report in reports] == pytest.approx([0, *ends[:-1]])


AMOUNTS = st.integers(0, 200)
INSTRUCTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("kernel"), st.integers(0, 2), AMOUNTS, AMOUNTS, AMOUNTS),
        st.tuples(st.just("copy"), st.integers(0, 2), AMOUNTS, AMOUNTS, AMOUNTS),
        st.tuples(st.just("order"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("wait")),
        st.tuples(st.just("mark")),
        st.tuples(st.just("think"), AMOUNTS),
    ),
    max_size=30,
)


@given(
    program=INSTRUCTIONS, sm=st.integers(1, 4), ce=st.integers(1, 4), hbm=st.integers(1, 9), kernel=st.integers(0, 9)
)
@settings(max_examples=150, deadline=None)
def test_any_program(toy, program, sm, ce, hbm, kernel):
    profile = toy(
        sm_bytes_per_s=sm * PER_PS, ce_bytes_per_s=ce * PER_PS, hbm_bytes_per_s=hbm * PER_PS, kernel_s=kernel * 1e-12
    )
    run = Program(profile)
    streams = [run.issuer.compute, run.copy_stream, run.issuer.add_stream("copy 2")]
    entries, marks = [], [0]
    for name, *arguments in [*program, ("wait",), ("mark",)]:
        if name in ("kernel", "copy"):
            stream, first, second, third = arguments
            demands = {"sm" if name == "kernel" else "ce": first, "hbm": second, "flops": third}
            entries.append(run._issue(name, profile.kernel_ps, streams[stream], None, demands))
        elif name == "order" and arguments[0] != arguments[1]:
            run.order(streams[arguments[0]], streams[arguments[1]])
        elif name == "wait" and entries:
            run.wait_for(entries[-1])
        elif name == "mark":
            run.issuer.simulator.run_to(run.issuer.host_ps)
            marks.append(run.issuer.host_ps)
        elif name == "think":
            run.issuer.spend(arguments[0])
    for begin, end in zip(marks, marks[1:], strict=False):
        check(run.report(begin, end), begin, end)
    # Later segments cannot change what was reported: a drained simulation reports the same.
    before = [run.report(begin, end) for begin, end in zip(marks, marks[1:], strict=False)]
    run.run()
    after = [run.report(begin, end) for begin, end in zip(marks, marks[1:], strict=False)]
    assert [(r.bound, r.stall_s, r.bus_bytes) for r in before] == [(r.bound, r.stall_s, r.bus_bytes) for r in after]
