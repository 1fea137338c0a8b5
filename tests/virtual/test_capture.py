"""The rules of captured graphs, and that a capture executes nothing while a replay executes everything."""

import pytest
import torch

from offload.virtual import CaptureError, RaceError, StampError, VirtualDevice


@pytest.fixture
def device(toy):
    return VirtualDevice(toy())


def fork(device, side):
    event = device.new_event()
    device.record(event)
    device.wait(event, side)


def joined(device, side):
    event = device.new_event()
    device.record(event, side)
    device.wait(event)


def test_a_capture_executes_nothing_and_a_replay_everything(device):
    state = device.from_host([1.0, 2.0], torch.float32)
    made = []

    def body():
        made.append(state * 10)
        state.add_(1)

    with device.active():
        graph = device.capture(body)
        assert device.to_host(state) == [1.0, 2.0]
        with device.quiet():
            assert made[0].isnan().all()
        for expected in ([10.0, 20.0], [20.0, 30.0]):
            graph.replay()
            assert device.to_host(made[0]) == expected
        assert device.to_host(state) == [3.0, 4.0]


def test_integers_are_poisoned_too(device):
    made = []
    tokens = device.from_host([[1, 5, 2]])
    with device.active():
        graph = device.capture(lambda: made.append(tokens.argmax(-1)))
        with device.quiet():
            assert made[0][0] < 0
        graph.replay()
        assert device.to_host(made[0]) == [1]


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_results_are_not_there_before_the_first_replay(toy, place):
    device, made = VirtualDevice(toy(), place), []
    x = device.from_host([1.0, 2.0], torch.float32)
    with device.active():
        graph = device.capture(lambda: made.append((x + 1) * 2))
        with pytest.raises(RaceError, match="'to_host' .* reads bytes 0..8 of activations, which nothing has written"):
            device.to_host(made[0])
        graph.replay()
        device.to_host(made[0])


def test_a_graph_is_not_replayed_inside_a_capture(device):
    x = device.from_host([1.0], torch.float32)
    with device.active():
        graph = device.capture(lambda: x.add_(1))
        with pytest.raises(CaptureError, match="replay inside a capture"):
            device.capture(graph.replay)
        assert device.to_host(x) == [1.0]


def test_a_replay_is_issued_as_one(device):
    x = device.from_host([1.0] * 8, torch.float32)

    def body():
        y = x
        for _ in range(10):
            y = y + 1

    with device.active():
        graph = device.capture(body)
        before = device.issuer.host_ps
        graph.replay()
        assert device.issuer.host_ps - before == device.profile.graph_issue_ps == 2


def test_copies_inside_are_put_back(device):
    host, slot, side = device.allocate_host(4), device.allocate_device(4), device.new_stream()
    host.fill_(7)
    slot.fill_(1)

    def body():
        fork(device, side)
        device.copy(slot, host, side)
        device.stamp(slot, 3)
        joined(device, side)

    graph = device.capture(body)
    assert slot.tolist() == [1] * 4
    with pytest.raises(StampError):
        device.check_stamp(slot, 3)
    graph.replay()
    assert slot.tolist() == [7] * 4
    device.check_stamp(slot, 3)


def test_waiting_for_an_event_of_the_outside(device):
    event = device.new_event()
    device.record(event)
    with pytest.raises(CaptureError, match="recorded outside"):
        device.capture(lambda: device.wait(event))


def test_a_stream_that_did_not_join_the_capture(device):
    host, slot, side = device.allocate_host(4), device.allocate_device(4), device.new_stream()
    with pytest.raises(CaptureError, match="did not join"):
        device.capture(lambda: device.copy(slot, host, side))


def test_a_stream_that_is_not_joined_at_the_end(device):
    host, slot, side = device.allocate_host(4), device.allocate_device(4), device.new_stream()

    def body():
        fork(device, side)
        device.copy(slot, host, side)

    with pytest.raises(CaptureError, match="stream 'copy' was forked .* not joined"):
        device.capture(body)


def test_a_join_before_the_last_copy_is_not_enough(device):
    host, slot, side = device.allocate_host(4), device.allocate_device(4), device.new_stream()

    def body():
        fork(device, side)
        joined(device, side)
        device.copy(slot, host, side)

    with pytest.raises(CaptureError, match="not joined"):
        device.capture(body)


def test_an_event_of_the_inside_used_outside(device):
    event = device.new_event()
    device.capture(lambda: device.record(event))
    with pytest.raises(CaptureError, match="recorded inside a captured graph"):
        device.wait(event)
    device.record(event)
    device.wait(event)


@pytest.mark.parametrize("what", ["to_host", "from_host", "synchronise", "mark_step", "capture"])
def test_what_a_capture_may_not_do(device, what):
    x = device.from_host([1])
    call = {
        "to_host": lambda: device.to_host(x),
        "from_host": lambda: device.from_host([1]),
        "synchronise": device.synchronise,
        "mark_step": lambda: device.mark_step("tg"),
        "capture": lambda: device.capture(lambda: None),
    }[what]
    with pytest.raises(CaptureError, match=f"{what} inside a capture"):
        device.capture(call)
    assert not device.capturing
    device.to_host(x)


def test_a_failed_capture_leaves_the_device_as_it_was(device):
    x = device.from_host([1.0], torch.float32)

    def body():
        x.add_(1)
        raise KeyboardInterrupt

    with device.active():
        with pytest.raises(KeyboardInterrupt):
            device.capture(body)
        assert not device.capturing
        assert device.to_host(x) == [1.0]


def test_branches_of_a_graph_are_not_the_eager_streams(device):
    # An eager copy that nothing waits for is in flight; inside the graph the same bytes are read.
    host, slot, side = device.allocate_host(4), device.allocate_device(4), device.new_stream()
    with device.active():
        graph = device.capture(lambda: slot + 1)
        device.copy(slot, host, side)
        with pytest.raises(RaceError, match="stream 'copy' may still be writing"):
            graph.replay()


def test_a_race_between_branches_of_a_graph(device):
    host, slot, side = device.allocate_host(4), device.allocate_device(4), device.new_stream()

    def body():
        fork(device, side)
        device.copy(slot, host, side)
        slot + 1
        joined(device, side)

    with device.active():
        graph = device.capture(body)
        with pytest.raises(RaceError, match=r"stream 'copy \(graph\)' may still be writing"):
            graph.replay()


def test_time_in_a_graph_is_that_of_the_streams_it_was_captured_from(device):
    # The kernel moves 8 bytes of device memory; the copy writes there too, so each has 5 bytes/ps of the 10: 1.6 ps.
    host, slot, side = device.allocate_host(100), device.allocate_device(100), device.new_stream()
    x = device.from_host([1.0], torch.float32)
    with device.active():

        def body():
            fork(device, side)
            device.copy(slot, host, side)
            x.add_(1)
            joined(device, side)

        graph = device.capture(body)
        spent = device.issuer.host_ps
        graph.replay()
        device.synchronise()
    copy = device.issuer.simulator.log[-1][-1]
    kernel = [entry for entry in device.issuer.simulator.log[0] if entry.kind == "kernel"][-1]
    start = spent + device.profile.graph_issue_ps
    assert (copy.flow_ps, copy.finish_ps) == (start + 3, start + 3 + 50)
    assert (kernel.flow_ps, kernel.finish_ps) == (start + 5, start + 7)
    assert device.issuer.host_ps == copy.finish_ps


def test_waiting_for_the_side_stream_at_the_end_is_a_join(device):
    host, slot, side = device.allocate_host(100), device.allocate_device(100), device.new_stream()

    def body():
        fork(device, side)
        device.copy(slot, host, side)
        joined(device, side)

    graph = device.capture(body)
    device.mark_step("capture")
    for _ in range(2):
        graph.replay()
        device.synchronise()
        device.mark_step("tg")
    assert [entry.reason for entry in device.issuer.simulator.log[0]] == ["join", "join"]
    assert device.step_report().stall_s == 0
