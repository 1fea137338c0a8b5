"""An oracle for the time of a prefetch step, computed without any simulation.

Who waits for whom is a graph whose cycles carry tokens (a pass each), and its equations are linear in (max, +): in
steady state a pass takes the largest ratio, over all cycles, of a cycle's time to its tokens.
"""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.virtual import VirtualDevice
from tests.toys import TOKENS, Toy, offloaded, prefetch
from tests.virtual.conftest import PER_PS

PASSES = 12
"""A cycle has at most four tokens here, one per slot, so that the pattern of passes repeats after a divisor of 12."""

Edge = tuple[str, str, int, int]


def maximum_cycle_ratio(edges: list[Edge]) -> Fraction:
    """Largest time / tokens of a cycle; edges are (from, to, time, tokens), and every cycle has a token.

    Starts at 0 and goes to the ratio of any cycle that beats the present one, until none does.
    """
    ratio = Fraction(0)
    while cycle := better_cycle(edges, ratio):
        ratio = Fraction(sum(edge[2] for edge in cycle), sum(edge[3] for edge in cycle))
    return ratio


def better_cycle(edges: list[Edge], ratio: Fraction) -> list[Edge]:
    """A cycle on which time - ratio * tokens is positive, found by longest paths that do not settle; else empty."""
    nodes = {edge[0] for edge in edges} | {edge[1] for edge in edges}
    length = dict.fromkeys(nodes, Fraction(0))
    arrived: dict[str, Edge] = {}
    changed = ""
    for _ in nodes:
        changed = ""
        for edge in edges:
            candidate = length[edge[0]] + edge[2] - ratio * edge[3]
            if candidate > length[edge[1]]:
                length[edge[1]], arrived[edge[1]], changed = candidate, edge, edge[1]
        if not changed:
            return []
    for _ in nodes:
        changed = arrived[changed][0]
    cycle = [arrived[changed]]
    while cycle[-1][0] != changed:
        cycle.append(arrived[cycle[-1][0]])
    return cycle


def test_the_oracle_itself():
    edges = [("a", "b", 3, 0), ("b", "a", 4, 1), ("b", "c", 10, 1), ("c", "b", 5, 1), ("c", "c", 6, 1)]
    assert maximum_cycle_ratio(edges) == Fraction(15, 2)


class Run:
    """Passes of an offloaded toy model on a profile where only FLOPs and the copies' bytes take time."""

    def __init__(self, profile, widths, config, reads_tokens):
        self.device = VirtualDevice(profile)
        self.model = Toy(widths)
        self.backend, self.plan = offloaded(self.model, config, self.device)
        self.ends = []
        self.log = self.device.issuer.simulator.log
        with self.device.active():
            for _ in range(3 * PASSES):
                self.starts_at = len(self.log[0])
                out = self.model(TOKENS)
                if reads_tokens:
                    self.device.to_host(out)
                self.ends.append(self.log[0][-1])
        self.device.synchronise()

    def step_ps(self):
        return Fraction(self.ends[-1].finish_ps - self.ends[-1 - PASSES].finish_ps, PASSES)

    def last_pass(self):
        return self.log[0][self.starts_at :]

    def compute_edges(self):
        """The chain of offloaded layers, with what lies between them; the last leads to the first of the next pass."""
        blocks, gaps, gap = [], [], 0
        offloaded_layers = list(self.plan.offloaded_layers)
        for entry in self.last_pass():
            time = 0 if entry.kind == "wait" else entry.finish_ps - entry.start_ps
            if entry.layer not in offloaded_layers:
                gap += time
            elif offloaded_layers.index(entry.layer) == len(blocks):
                gaps.append(gap)
                gap = 0
                blocks.append(time)
            else:
                blocks[-1] += time
        edges = [(f"start {k}", f"end {k}", time, 0) for k, time in enumerate(blocks)]
        edges += [(f"end {k}", f"start {k + 1}", gaps[k + 1], 0) for k in range(len(blocks) - 1)]
        return [*edges, (f"end {len(blocks) - 1}", "start 0", gap + gaps[0], 1)]

    def copy_edges(self):
        """A copy follows its slot's last reader and the copy before it; its layer's compute follows it."""
        edges, issued = [], []
        for k in range(len(self.plan.offloaded_layers)):
            follower = self.plan.next_owner(k)
            if follower != k:
                time = self.copy_ps(follower)
                edges.append((f"end {k}", f"copy {k}", 0, 0))
                edges.append((f"copy {k}", f"start {follower}", time, int(follower <= k)))
                issued.append((k, time))
        for (k, time), (after, _) in zip(issued, [*issued[1:], *issued[:1]], strict=True):
            edges.append((f"copy {k}", f"copy {after}", time, int(after <= k)))
        return edges

    def copy_ps(self, ordinal):
        nbytes = self.backend._slab.layer(self.plan.offloaded_layers[ordinal]).numel()
        profile = self.device.profile
        return profile.copy_ps - (-nbytes * PER_PS // profile.ce_bytes_per_s)


@given(
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    group=st.integers(1, 3),
    count=st.integers(1, 3),
    step=st.integers(1, 4),
    ce=st.sampled_from([1, 7, 40]),
    flops=st.sampled_from([1, 30]),
    reads_tokens=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_step_time_is_the_maximum_cycle_ratio(toy, widths, group, count, step, ce, flops, reads_tokens):
    count = min(count, group)
    if len(widths) < group:
        widths = widths * group
    profile = toy(
        issue_s=0.0,
        ce_bytes_per_s=ce * PER_PS,
        half_flops_per_s=flops * PER_PS,
        single_flops_per_s=flops * PER_PS,
        # So fast that its sharing never shows: every operator's bytes take one picosecond at most.
        hbm_bytes_per_s=10**9 * PER_PS,
    )
    run = Run(profile, widths[:6], prefetch(group, count, step), reads_tokens)
    assert run.step_ps() == maximum_cycle_ratio(run.compute_edges() + run.copy_edges())


def test_more_slots_never_make_a_step_longer(toy):
    profile = toy(issue_s=0.0, ce_bytes_per_s=PER_PS * 7)
    times = [Run(profile, [5, 30, 9, 30], prefetch(1, 1, step), True).step_ps() for step in (1, 2, 3)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_in_steady_state_the_planned_bytes_cross_the_bus(step):
    device = VirtualDevice("h200-pcie5")
    model = Toy([300, 200, 100])
    backend, plan = offloaded(model, prefetch(1, 1, step), device)
    with device.active():
        for _ in range(6):
            device.to_host(model(TOKENS))
            device.mark_step("tg")
    moving = [layer for ordinal, layer in enumerate(plan.offloaded_layers) if plan.next_owner(ordinal) != ordinal]
    planned = sum(backend._slab.layer(layer).numel() for layer in moving)
    for report in device.step_reports()[-2:]:
        assert report.bus_bytes == planned
        assert report.bound.bound_s <= Fraction(round(report.step_s * 1e12), 10**12)
