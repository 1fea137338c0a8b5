"""The prefetch ring, run step by step for every number of layers and slots that fits the test's time."""

import pytest

from offload.ring import least_step_without_stalls, refill_order, stalling_layers

SIZES = [(count, step) for count in range(1, 26) for step in range(1, 28)]


def test_every_layer_finds_itself_in_its_slot_in_every_pass():
    for count, step in SIZES:
        order = refill_order(count, step)
        slots = list(range(min(step, count)))
        for _ in range(3):
            for ordinal in range(count):
                assert slots[ordinal % len(slots)] == ordinal, (count, step)
                if order:
                    slots[ordinal % len(slots)] = order[ordinal]


def test_a_layer_that_shares_no_slot_is_never_copied_again():
    for count, step in SIZES:
        order = refill_order(count, step)
        owners = [sum(other % step == ordinal % step for other in range(count)) for ordinal in range(count)]
        assert [order[k] == k for k in range(len(order))] == [owners[k] == 1 for k in range(len(order))]
        assert bool(order) == (step < count)
        assert sorted(order) == list(range(len(order)))


def test_a_huge_step_costs_nothing():
    assert refill_order(3, 10**12) == ()


def stalls_by_definition(offloaded, layers, step):
    """Walk from a layer back to its slot's previous owner; a stall if no other layer was passed."""
    found = []
    for ordinal, layer in enumerate(offloaded):
        owners = [k for k in range(len(offloaded)) if k % step == ordinal % step]
        if len(owners) == 1:
            continue
        previous = offloaded[owners[owners.index(ordinal) - 1]]
        back = layers.index(layer) - 1
        if layers[back] == previous:
            found.append(layer)
    return tuple(found)


@pytest.mark.parametrize("chosen", ["last-of-group", "last-two-of-group", "all", "with-gaps-in-the-numbers"])
def test_stalls_are_those_of_the_definition(chosen):
    for total in range(1, 14):
        layers = list(range(total)) if chosen != "with-gaps-in-the-numbers" else list(range(0, 3 * total, 3))
        offloaded = {
            "last-of-group": layers[2::3],
            "last-two-of-group": [layer for layer in layers if layer % 4 >= 2],
            "all": layers,
            "with-gaps-in-the-numbers": layers[1::2],
        }[chosen]
        for step in range(1, 15):
            assert stalling_layers(offloaded, layers, step) == stalls_by_definition(offloaded, layers, step)


def test_pairs_with_step_one_stall_at_their_second_layer():
    assert stalling_layers([6, 7, 14, 15, 22, 23], range(24), 1) == (7, 15, 23)
    assert least_step_without_stalls([6, 7, 14, 15, 22, 23], range(24), 1) == 2


def test_the_pass_is_a_circle():
    assert stalling_layers([0, 3], range(4), 1) == (0,)


def test_no_step_helps_where_two_layers_are_all():
    assert stalling_layers([0, 1], range(2), 1) == (0, 1)
    assert least_step_without_stalls([0, 1], range(2), 1) is None
