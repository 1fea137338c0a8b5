"""The prefetch ring: which offloaded layer a slot holds next, and who has to wait for it.

M offloaded layers are counted by their ordinal 0..M-1, in the order in which they run. There are `step` slots, and
ordinal k owns slot `k % step`. After k has run, its slot goes to its next owner: k + step, or, past the end, the
slot's first owner, for the next pass. Every owner of a slot keeps to that slot, so the rule holds for every M, also
where M is no multiple of the step.
"""

from collections.abc import Sequence


def refill_order(count: int, step: int) -> tuple[int, ...]:
    """Say which ordinal is put into a slot after each ordinal.

    Args:
        count: number of offloaded layers, M.
        step: prefetch step, at least 1.

    Returns:
        For each ordinal k the ordinal that follows it in slot `k % step` (k itself where it is the slot's only owner,
        which is never copied again); empty where every layer has a slot of its own.
    """
    if step >= count:
        return ()
    return tuple(k + step if k + step < count else k % step for k in range(count))


def stalling_layers(offloaded: Sequence[int], layers: Sequence[int], step: int) -> tuple[int, ...]:
    """Name the layers whose copy has no other layer's compute to hide behind.

    Args:
        offloaded: indices of the offloaded layers, ascending.
        layers: indices of all layers, ascending.
        step: prefetch step, at least 1.

    Returns:
        Indices of the offloaded layers between which and their slot's previous owner no other layer lies, cyclically.
    """
    position = {layer: place for place, layer in enumerate(layers)}
    stalls = []
    for previous, follower in enumerate(refill_order(len(offloaded), step)):
        distance = position[offloaded[follower]] - position[offloaded[previous]]
        if distance % len(layers) == 1:
            stalls.append(offloaded[follower])
    return tuple(sorted(stalls))


def least_step_without_stalls(offloaded: Sequence[int], layers: Sequence[int], step: int) -> int | None:
    """The smallest step above `step` at which no layer stalls and memory is still freed; None if there is none."""
    for larger in range(step + 1, len(offloaded)):
        if not stalling_layers(offloaded, layers, larger):
            return larger
    return None
