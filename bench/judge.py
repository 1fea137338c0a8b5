"""Keeps the answers of the first configuration that ran, and compares every other one with them."""

from __future__ import annotations

import sys

from bench.measure import DECODE_PROMPT, Timing, prompts
from bench.tokens import Agreement, Answers, Yardstick, compare, measure_yardstick
from offload.engine import Engine

CONTINUED = 8
"""Tokens after a prompt along which torch's error is measured, where the test itself has only one."""


class Judge:
    """Tokens of one sweep; the reference of a test is the first run of it that fits."""

    def __init__(self) -> None:
        self._references: dict[tuple[str, int, int], Answers] = {}
        self._yardsticks: dict[tuple[str, int, int], Yardstick] = {}
        self._reference_backend: str | None = None
        self._total = Agreement()

    def verdict(self, engine: Engine, kind: str, batch: int, length: int, timing: Timing) -> str:
        """Compare every repetition's tokens; returns the text of the row."""
        parts = engine.parts
        if parts.device.torch_device.type == "meta":
            return ""
        key, first = (kind, batch, length), timing.tokens[0]
        backend = parts.plan.backend
        is_reference = key not in self._references
        if is_reference:
            self._references[key] = first
            self._reference_backend = backend
            if parts.device.torch_device.type == "cuda":
                self._yardsticks[key] = _yardstick(engine, kind, batch, length, first)
        may_differ = "uva" in (backend, self._reference_backend)
        yardstick = self._yardsticks.get(key) if may_differ else None
        found = Agreement()
        for answers in timing.tokens:
            found.add(compare(answers, self._references[key], yardstick))
        self._total.add(found)
        return "reference" if is_reference and not found.wrong else str(found)

    def summary(self) -> str:
        """One sentence about all comparisons."""
        if not self._references:
            return "Tokens: none to compare."
        against = {None: "the run without offload"}.get(self._reference_backend, "the first run that fits")
        found = self._total
        ties = f", {found.ties} of them ties closer than the kernel's error" if found.ties else ""
        if found.wrong:
            return f"Tokens: {len(found.wrong)} answers differ from {against}; the first: {found.wrong[0]}."
        return f"Tokens: {found.compared} compared with {against}, all equal{ties}."

    def exit_code(self) -> int:
        """0, or 1 with a line on stderr if an answer was wrong."""
        if self._total.wrong:
            print(f"offload: fatal: tokens differ without a tie to explain it: {self._total.wrong[0]}", file=sys.stderr)
        return 1 if self._total.wrong else 0


def _yardstick(engine: Engine, kind: str, batch: int, length: int, answers: Answers) -> Yardstick:
    """Measure along the answers of a decode test, or along the continuation of a prompt test's prompts."""
    if kind == "tg":
        return measure_yardstick(engine, prompts(batch, DECODE_PROMPT, engine.parts.vocabulary), answers)
    shown = prompts(batch, length, engine.parts.vocabulary)
    continued = engine.generate(shown, max(1, min(CONTINUED, engine.context - length)), stop_at_eos=False)
    return measure_yardstick(engine, shown, [generation.token_ids for generation in continued])
