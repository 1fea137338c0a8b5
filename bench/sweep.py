"""One sweep: every configuration loaded, timed and its tokens compared, each row as soon as it is there.

A configuration that does not fit is a row that says what it needs and what there is, and the sweep goes on.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from bench.arms import pasteable
from bench.judge import Judge
from bench.measure import Timing, time_decode, time_prompt
from bench.rows import NOT_LOADED, Row, tokens_per_row
from bench.subject import Subject
from offload.bound import Bound
from offload.config import OffloadConfig
from offload.device import Device
from offload.engine import Engine
from offload.errors import NotEnoughMemoryError
from offload.plan import plan
from offload.suggest import bus_bytes_per_token, routed_experts
from offload.text import gib

OUT_OF_MEMORY = (NotEnoughMemoryError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Sizes:
    """What is timed: prompt lengths, numbers of decode steps, batches (their cross product) and repetitions."""

    prompts: Sequence[int] = (512,)
    steps: Sequence[int] = (32,)
    batches: Sequence[int] = (1,)
    repetitions: int = 3

    @property
    def tests(self) -> list[tuple[str, int, int]]:
        """(kind, batch, tokens) of each test; a length of 0 is none."""
        return [
            (kind, batch, length)
            for batch in self.batches
            for kind, lengths in (("pp", self.prompts), ("tg", self.steps))
            for length in lengths
            if length
        ]


def sizes_of(args: argparse.Namespace, device: Device) -> Sizes:
    """What the options of `bench.arguments.add_sizes` ask for; a simulated time needs no repetition."""
    repetitions = args.repetitions or (1 if device.simulated else 3)
    return Sizes(args.n_prompt, args.n_gen, args.batch, repetitions)


def sweep(
    subject: Subject, configs: Sequence[OffloadConfig], sizes: Sizes, judge: Judge, profile: str | None = None
) -> Iterator[Row]:
    """Measure every configuration; yields each row as soon as it is measured.

    Args:
        subject: the model and its device.
        configs: in order; the first that fits is what the others' tokens are compared with.
        sizes: what is timed.
        judge: compares the tokens.
        profile: rates for the bound of a real device; a simulated one has its own.
    """
    for config in configs:
        device = subject.open_device()
        try:
            yield from _arm(subject, config, device, sizes, judge, profile)
        finally:
            device.close()
            # The model's cycles hold its memory, and the next configuration needs it.
            gc.collect()


def _arm(
    subject: Subject, config: OffloadConfig, device: Device, sizes: Sizes, judge: Judge, profile: str | None
) -> Iterator[Row]:
    blank = _blank(subject, config, device)
    try:
        engine = subject.load(config, device)
    except OUT_OF_MEMORY as error:
        yield replace(blank, test=NOT_LOADED, batch=min(sizes.batches), note=does_not_fit(error))
        return
    with engine:
        for kind, batch, length in sizes.tests:
            row = replace(blank, test=f"{kind}{length}", batch=batch)
            try:
                timing = (time_prompt if kind == "pp" else time_decode)(engine, batch, length, sizes.repetitions)
            except OUT_OF_MEMORY as error:
                yield replace(row, note=does_not_fit(error))
                continue
            limit = _bound(subject, config, kind, batch, length, profile) if profile else None
            tokens = judge.verdict(engine, kind, batch, length, timing)
            planned_bytes = None if device.simulated else _planned_bus_bytes(subject, config, row)
            yield replace(_timed(row, timing, limit, planned_bytes, engine), tokens=tokens)


def _blank(subject: Subject, config: OffloadConfig, device: Device) -> Row:
    made = plan(subject.specs, config)
    return Row(
        backend=made.backend or "none",
        config=pasteable(config),
        model=subject.name,
        device=device.name,
        simulated=device.simulated,
        load_format=subject.load_format,
        batch=0,
        test="",
        offloaded_bytes=made.offloaded_bytes,
        slot_bytes=made.slot_bytes,
    )


def _timed(row: Row, timing: Timing, limit: Bound | None, planned_bytes: int | None, engine: Engine) -> Row:
    report, memory = timing.report, engine.report()
    step_s = timing.step_s
    bus_bytes = report.bus_bytes if report else planned_bytes
    limit = report.bound if report else limit
    return replace(
        row,
        tokens_per_s=tokens_per_row(row.test, row.batch) / step_s,
        step_s=step_s,
        bound_s=float(limit.bound_s) if limit else None,
        share_of_bound=float(limit.bound_s) / step_s if limit else None,
        bound_fastest_link_s=float(limit.bound_fastest_link_s) if limit else None,
        offloaded_bytes=memory.offloaded_bytes,
        device_bytes=memory.device_bytes,
        slot_bytes=memory.slot_bytes,
        bus_bytes_per_step=bus_bytes,
        bus_bytes_per_s=bus_bytes / step_s if bus_bytes is not None else None,
        stall_s=report.stall_s if report else None,
        idle_s=sum(report.idle_s.values()) if report else None,
        samples_s=timing.samples_s,
    )


def _planned_bus_bytes(subject: Subject, config: OffloadConfig, row: Row) -> int | None:
    """Bytes that the plan moves in a step; None where they depend on the experts that several tokens are routed to."""
    experts = routed_experts(subject.described)
    if experts and row.backend == "uva" and (row.batch > 1 or row.test.startswith("pp")):
        return None
    return bus_bytes_per_token(plan(subject.specs, config), subject.specs, experts)


def _bound(subject: Subject, config: OffloadConfig, kind: str, batch: int, length: int, profile: str) -> Bound:
    """The bound of the same step at a profile's rates: counted by a virtual GPU, on which it runs without weights."""
    twin = replace(subject, load_format="meta", device=f"virtual:{profile}", graph=False)
    device = twin.open_device()
    try:
        with twin.load(config, device) as engine:
            test = time_prompt(engine, batch, length, 1) if kind == "pp" else time_decode(engine, batch, 1, 1)
            return test.report.bound
    finally:
        device.close()


def does_not_fit(error: BaseException) -> str:
    """The note of a row that could not run: what is needed and what there is, in GiB."""
    needed, free = getattr(error, "needed_bytes", None), getattr(error, "free_bytes", None)
    if needed is None:
        return f"does not fit: {str(error).splitlines()[0]}"
    return f"does not fit: needs {gib(needed)}, has {gib(free)}"
