"""Slot stamps: which layer's weights a buffer contains, in issue order.

A copy that is ordered correctly but puts the wrong layer into a slot is no race; the stamp is what sees it.
"""

from __future__ import annotations

from offload.virtual.races import Range


class StampError(RuntimeError):
    """A layer reads a slot that contains another layer."""


class Stamps:
    """Stamped buffers of one device; slots are numbered in the order in which they are first stamped."""

    def __init__(self) -> None:
        self._contents: dict[Range, int] = {}
        self._numbers: dict[Range, int] = {}

    def put(self, where: Range, layer: int) -> None:
        if where not in self._numbers:
            self._numbers[where] = len(self._numbers)
        self._contents[where] = layer

    def check(self, where: Range, layer: int) -> None:
        """Raise unless the buffer contains this layer.

        Raises:
            StampError: it contains another one, or nothing yet.
        """
        contained = self._contents.get(where)
        if contained != layer:
            inside = "nothing was copied into it" if contained is None else f"it contains layer {contained}"
            raise StampError(f"layer {layer} is about to read {self.name(where) or 'a buffer'}, but {inside}")

    def name(self, where: Range) -> str:
        """ "slot 1 (layer 5)" for bytes inside a stamped buffer, "" elsewhere."""
        storage, start, end = where
        for buffer, number in self._numbers.items():
            if buffer[0] == storage and buffer[1] <= start and end <= buffer[2]:
                layer = self._contents.get(buffer)
                return f"slot {number} ({'empty' if layer is None else f'layer {layer}'})"
        return ""

    def forget(self, storage: int) -> None:
        """The storage died."""
        for known in (self._contents, self._numbers):
            for where in [where for where in known if where[0] == storage]:
                del known[where]

    def snapshot(self) -> dict[Range, int]:
        return dict(self._contents)

    def restore(self, contents: dict[Range, int]) -> None:
        self._contents = contents
