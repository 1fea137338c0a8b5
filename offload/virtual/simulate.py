"""The event simulation: when each issued entry starts and ends, given that all of them share the bus and the memory.

Clocks do not move when an operator is issued, since a later kernel can slow an earlier copy. Entries are queued with
their costs, and time is advanced only when somebody waits, over a sequence of moments between which every rate is
constant.

Every number is a whole one. Time is in picoseconds; an amount of bytes is kept in bytes x 10^12, so that a rate in
bytes/s times picoseconds is exact; shares and finishing times are rounded so that a resource never gives more than
its rate.

An operator first takes its launch time, then works on all its demands at once, and is done when the last is. A
resource is shared evenly among those that want it (water filling). The bus: kernel loads together at most `sm`,
copies together at most `ce`, both together at most the faster of the two.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from offload.virtual.clocks import Entry
from offload.virtual.profiles import PICOSECONDS_PER_S, Profile


class Segment(NamedTuple):
    """A stretch of time in which every rate is constant, and the work that each resource did in it.

    Work is in bytes (or FLOPs) x 10^12: a resource that is never idle does rate x picoseconds of it.
    """

    start_ps: int
    end_ps: int
    sm: int
    ce: int
    hbm: int
    flops: int


class Simulator:
    """Streams of entries over shared resources.

    Attributes:
        now_ps: up to here everything is decided.
        segments: the past, without gaps.
        log: per stream, every entry in order.
    """

    def __init__(self, profile: Profile) -> None:
        self._sm = profile.sm_bytes_per_s
        self._ce = profile.ce_bytes_per_s
        self._bus = profile.bus_bytes_per_s
        self._single = {"hbm": profile.hbm_bytes_per_s, "flops": profile.half_flops_per_s}
        self._queues: list[deque[Entry]] = []
        self._free_ps: list[int] = []
        self._running: dict[int, Entry] = {}
        self._left: dict[int, dict[str, int]] = {}
        self.now_ps = 0
        self.segments: list[Segment] = []
        self.log: list[list[Entry]] = []

    def submit(self, entry: Entry) -> None:
        """Queue an entry on its stream; entries are submitted in the order in which they are issued."""
        while len(self._queues) <= entry.stream.index:
            self._queues.append(deque())
            self.log.append([])
            self._free_ps.append(0)
        self._queues[entry.stream.index].append(entry)
        self.log[entry.stream.index].append(entry)

    def run_until(self, entry: Entry) -> int:
        """Advance until `entry` is done and return when that was, in ps."""
        while entry.finish_ps < 0:
            self._start()
            if entry.finish_ps < 0:
                self._advance(None)
        return entry.finish_ps

    def run_to(self, time_ps: int) -> None:
        """Advance to a moment before which nothing more will be issued."""
        while self.now_ps < time_ps:
            self._start()
            self._advance(time_ps)

    def drain(self) -> int:
        """Advance until everything that was submitted is done and return the last finish, in ps."""
        while any(self._queues):
            self._start()
            if any(self._queues):
                self._advance(None)
        return max(self._free_ps, default=0)

    # -- one moment -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start whatever can start now; a finished wait may let others start, so repeat until nothing changes."""
        changed = True
        while changed:
            changed = False
            for index, queue in enumerate(self._queues):
                while queue and index not in self._running and self._begin(index, queue[0]):
                    changed = True

    def _begin(self, index: int, entry: Entry) -> bool:
        """Let the head of a stream begin if it was issued and what it waits for is done."""
        if entry.issue_ps > self.now_ps:
            return False
        if entry.start_ps < 0:
            entry.reached_ps = self._free_ps[index]
            entry.start_ps = max(entry.reached_ps, entry.issue_ps)
        if entry.after is not None and entry.after.finish_ps < 0:
            return False
        entry.flow_ps = self.now_ps + entry.launch_ps
        left = {name: amount * PICOSECONDS_PER_S for name, amount in entry.demands.items() if amount}
        if entry.launch_ps == 0 and not left:
            self._finish(index, entry)
            return True
        self._running[index] = entry
        self._left[index] = left
        return True

    def _finish(self, index: int, entry: Entry) -> None:
        entry.finish_ps = self._free_ps[index] = self.now_ps
        self._queues[index].popleft()

    def _advance(self, limit_ps: int | None) -> None:
        """Move to the next moment at which a rate changes, or to the limit."""
        now = self.now_ps
        wants: dict[str, list[int]] = {"sm": [], "ce": [], "hbm": [], "flops": []}
        moments = [limit_ps] if limit_ps is not None else []
        for index, entry in self._running.items():
            if entry.flow_ps > now:
                moments.append(entry.flow_ps)
            else:
                for name in self._left[index]:
                    wants[name].append(index)
        moments += [queue[0].issue_ps for queue in self._queues if queue and queue[0].issue_ps > now]
        shares = self._shares(wants)
        for name, takers in wants.items():
            for index in takers:
                moments.append(now - (-self._left[index][name] // shares[name]))
        if not moments:
            raise AssertionError(f"nothing can happen: {[queue[0] for queue in self._queues if queue]}")
        then = min(moments)
        self.now_ps = then
        self._work(now, wants, shares)

    def _work(self, since_ps: int, wants: dict[str, list[int]], shares: dict[str, int]) -> None:
        """Do what was possible between `since_ps` and now, and finish what is done."""
        elapsed = self.now_ps - since_ps
        work = dict.fromkeys(wants, 0)
        for name, takers in wants.items():
            for index in takers:
                left = self._left[index]
                # The last picosecond of a flow is rarely full: what is delivered is what was left.
                done = min(left[name], shares[name] * elapsed)
                work[name] += done
                left[name] -= done
                if not left[name]:
                    del left[name]
        if elapsed:
            self.segments.append(Segment(since_ps, self.now_ps, work["sm"], work["ce"], work["hbm"], work["flops"]))
        for index in list(self._running):
            entry = self._running[index]
            if not self._left[index] and entry.flow_ps <= self.now_ps:
                del self._running[index], self._left[index]
                self._finish(index, entry)

    def _shares(self, wants: dict[str, list[int]]) -> dict[str, int]:
        """Rate of each taker of each resource."""
        shares = {name: rate // len(wants[name]) for name, rate in self._single.items() if wants[name]}
        readers, copies = len(wants["sm"]), len(wants["ce"])
        caps = [("sm", readers, self._sm // readers)] if readers else []
        caps += [("ce", copies, self._ce // copies)] if copies else []
        shares.update(water_fill(caps, self._bus))
        return shares


def water_fill(groups: list[tuple[str, int, int]], total: int) -> dict[str, int]:
    """Divide `total` evenly among takers, none above its cap; what one cannot use goes to the others.

    Args:
        groups: name, number of takers, cap of each taker.

    Returns:
        Rate of each taker, by group name; whole numbers, rounded down.
    """
    shares: dict[str, int] = {}
    takers = sum(count for _, count, _ in groups)
    for name, count, cap in sorted(groups, key=lambda group: group[2]):
        shares[name] = min(cap, total // takers)
        total -= shares[name] * count
        takers -= count
    return shares
