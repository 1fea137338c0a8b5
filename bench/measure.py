"""Times of a loaded model, as llama-bench takes them: prompt processing (pp) and decode steps (tg).

A first prompt is not counted, nor are the first two steps of every batch. On a real device a sample is the wall time
of one repetition, with the device idle before and after; on a simulated device it is the simulated time of one step,
which the device reports itself. The tokens that come out are kept, so that what was timed is also what was checked.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offload.engine import Engine

DECODE_PROMPT = 16
"""Tokens before the first decode step: enough for the answer to depend on something, few enough to cost nothing."""
WARM_STEPS = 2
"""Steps before those that are timed: with graphs the first runs eagerly, and the second is captured."""


@dataclass(frozen=True)
class Timing:
    """One test of one configuration.

    Attributes:
        samples_s: per repetition, the time of the whole prompt (pp) or of one decode step (tg).
        tokens: per repetition and sequence, the tokens that were chosen.
        report: of the median step, on a simulated device; None on a real one.
    """

    samples_s: tuple[float, ...]
    tokens: tuple[tuple[tuple[int, ...], ...], ...]
    report: Any = None

    @property
    def step_s(self) -> float:
        """Median time; on a simulated device that of the step that `report` describes."""
        return self.report.step_s if self.report is not None else statistics.median(self.samples_s)


def prompts(batch: int, length: int, vocabulary: int) -> list[list[int]]:
    """The same random prompts for every configuration: `batch` lists of `length` tokens, all different."""
    draw = random.Random(f"{batch} x {length}")
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(batch)]


def time_prompt(engine: Engine, batch: int, length: int, repetitions: int) -> Timing:
    """Time `batch` prompts of `length` tokens, from their tokens to the first new ones."""
    parts = engine.parts
    texts = prompts(batch, length, parts.vocabulary)
    engine.start(texts, length)
    samples, tokens, reports = [], [], []
    for _ in range(repetitions):
        parts.device.synchronise()
        begin = time.perf_counter()
        decoding = engine.start(texts, length)
        parts.device.synchronise()
        samples.append(time.perf_counter() - begin)
        tokens.append(tuple((token,) for token in decoding.last))
        if parts.device.simulated:
            reports.append(parts.device.step_report())
    return _timing(samples, tokens, reports)


def time_decode(engine: Engine, batch: int, steps: int, repetitions: int) -> Timing:
    """Time `steps` decode steps of `batch` sequences after a short prompt, choosing the likeliest tokens.

    The answers are kept whole: one token of the prompt's pass and one of each step, timed or not.
    """
    parts = engine.parts
    length = min(DECODE_PROMPT, engine.context - WARM_STEPS - steps)
    if length < 1:
        raise ValueError(f"{steps} decode steps do not fit into a context of {engine.context}: use a smaller -n")
    texts = prompts(batch, length, parts.vocabulary)
    samples, tokens, reports = [], [], []
    for _ in range(repetitions):
        decoding = engine.start(texts, length + WARM_STEPS + steps)
        answers = [decoding.last, *(engine.decode_step(decoding) for _ in range(WARM_STEPS))]
        parts.device.synchronise()
        begin = time.perf_counter()
        for _ in range(steps):
            answers.append(engine.decode_step(decoding))
            if parts.device.simulated:
                reports.append(parts.device.step_report())
        parts.device.synchronise()
        samples.append((time.perf_counter() - begin) / steps)
        tokens.append(tuple(zip(*answers, strict=True)))
    return _timing(samples, tokens, reports)


def _timing(samples: Sequence[float], tokens: Sequence[Any], reports: Sequence[Any]) -> Timing:
    if not reports:
        return Timing(tuple(samples), tuple(tokens))
    ordered = sorted(reports, key=lambda report: report.step_s)
    # A step that was run, not an average of several, so that its bound and its idle time add up to it.
    return Timing(tuple(report.step_s for report in reports), tuple(tokens), ordered[(len(ordered) - 1) // 2])
