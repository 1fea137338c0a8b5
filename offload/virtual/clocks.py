"""Vector clocks: which operator is known to be done when another starts.

Every stream counts its operators. A stream's clock says, for each stream, how many of that stream's operators are
ordered before whatever it issues next; events carry a clock from one stream to another, and the host carries one to
all of them.
"""

from __future__ import annotations

Clock = dict[int, int]


def join(clock: Clock, other: Clock) -> None:
    """Raise `clock` to the later of the two, stream by stream."""
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


class VirtualStream:
    """A queue of operators that run in order.

    Attributes:
        index: number of the stream on its device.
        name: "compute", "copy", "copy 2"; those inside a captured graph say so.
        clock: what is ordered before the next operator of this stream.
        last: the entry issued last (None: nothing yet).
    """

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.clock: Clock = {index: 0}
        self.last: Entry | None = None

    def tick(self) -> int:
        """Count one more operator and return its number, its epoch."""
        self.clock[self.index] += 1
        return self.clock[self.index]

    def __repr__(self) -> str:
        return f"stream {self.name!r}"


class Entry:
    """One thing in a stream: an operator, or a wait for another entry.

    Issued with its costs; the simulation fills in when it was reached, began to work and finished.

    Attributes:
        kind: "kernel", "copy", "read" (to the host) or "wait".
        name, layer: the operator, and the decoder layer it belongs to.
        epoch: its number in its stream.
        issue_ps: when the host had issued it.
        launch_ps: from its turn until its bytes flow.
        demands: bytes or FLOPs by resource (sm, ce, hbm, flops), whole numbers.
        after: for a wait, the entry that it waits for.
        reason: for a wait, what the waiting is called in a report.
        reached_ps, start_ps, flow_ps, finish_ps: turn came; turn came and issued; launched; done.
    """

    __slots__ = ("kind", "name", "layer", "stream", "epoch", "issue_ps", "launch_ps", "demands", "after", "reason",
                 "reached_ps", "start_ps", "flow_ps", "finish_ps")  # fmt: skip

    def __init__(
        self,
        kind: str,
        name: str,
        layer: int | None,
        stream: VirtualStream,
        epoch: int,
        issue_ps: int,
        launch_ps: int = 0,
        demands: dict[str, int] | None = None,
        after: Entry | None = None,
        reason: str = "",
    ) -> None:
        self.kind = kind
        self.name = name
        self.layer = layer
        self.stream = stream
        self.epoch = epoch
        self.issue_ps = issue_ps
        self.launch_ps = launch_ps
        self.demands = demands or {}
        self.after = after
        self.reason = reason
        self.reached_ps = self.start_ps = self.flow_ps = self.finish_ps = -1

    def bring(self, layer: int) -> None:
        """This copy brings a layer's weights, whichever layer ran when it was issued."""
        self.layer = layer

    def __repr__(self) -> str:
        where = "" if self.layer is None else f" of layer {self.layer}"
        return f"{self.name!r}{where} on {self.stream!r}"


class VirtualEvent:
    """A point in a stream that others can wait for.

    Attributes:
        recorded: False until the first record; waiting for such an event orders nothing, as on CUDA.
        entry: the last entry of the stream when the event was recorded.
        clock: that stream's clock then.
        capture: the capture in which it was recorded last, None outside.
    """

    def __init__(self) -> None:
        self.recorded = False
        self.entry: Entry | None = None
        self.clock: Clock = {}
        self.capture: object | None = None
