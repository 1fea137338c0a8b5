"""What is timed, and that what is timed is what was checked."""

from itertools import count
from types import SimpleNamespace

import pytest

from bench.measure import DECODE_PROMPT, WARM_STEPS, Timing, prompts, time_decode, time_prompt


class FakeDevice:
    def __init__(self, simulated):
        self.simulated = simulated
        self.reports = []
        self.synchronised = 0

    def synchronise(self):
        self.synchronised += 1

    def step_report(self):
        return self.reports[-1]


class FakeEngine:
    """Counts calls; every pass answers with how many passes there were in its batch."""

    context = 100

    def __init__(self, simulated=False):
        self.parts = SimpleNamespace(device=FakeDevice(simulated), vocabulary=50)
        self.starts, self.steps = [], 0

    def _mark(self, step_s):
        self.parts.device.reports.append(SimpleNamespace(step_s=step_s))

    def start(self, texts, context):
        self.starts.append(([len(text) for text in texts], context))
        self._mark(1.0 + len(self.starts))
        return SimpleNamespace(last=[0] * len(texts), at=0)

    def decode_step(self, decoding):
        self.steps += 1
        decoding.at += 1
        decoding.last = [decoding.at] * len(decoding.last)
        self._mark(decoding.at / 10)
        return decoding.last


def test_prompts_are_the_same_for_every_configuration_and_differ_from_each_other():
    assert prompts(3, 20, 1000) == prompts(3, 20, 1000)
    assert len({tuple(prompt) for prompt in prompts(3, 20, 1000)}) == 3
    assert all(0 <= token < 7 for prompt in prompts(2, 50, 7) for token in prompt)


def test_a_prompt_is_timed_after_one_that_is_not():
    engine = FakeEngine()
    timing = time_prompt(engine, batch=2, length=6, repetitions=3)
    assert engine.starts == [([6, 6], 6)] * 4 and engine.steps == 0
    assert len(timing.samples_s) == 3 and timing.tokens == (((0,), (0,)),) * 3 and timing.report is None


def test_decode_steps_are_timed_without_their_prompt_and_their_tokens_kept(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr("bench.measure.time", SimpleNamespace(perf_counter=count().__next__))
    timing = time_decode(engine, batch=2, steps=4, repetitions=3)
    assert timing.samples_s == (0.25,) * 3  # one tick for each repetition of four steps
    room = DECODE_PROMPT + WARM_STEPS + 4
    assert engine.starts == [([DECODE_PROMPT] * 2, room)] * 3 and engine.steps == 3 * (WARM_STEPS + 4)
    assert timing.tokens == (((0, 1, 2, 3, 4, 5, 6),) * 2,) * 3
    assert engine.parts.device.synchronised == 6


def test_a_simulated_row_is_one_step_that_ran_not_an_average():
    timing = time_decode(FakeEngine(simulated=True), batch=1, steps=4, repetitions=1)
    assert timing.samples_s == (0.3, 0.4, 0.5, 0.6)
    assert timing.step_s == timing.report.step_s == 0.4
    assert time_prompt(FakeEngine(simulated=True), 1, 6, 2).samples_s == (3.0, 4.0)


def test_a_measured_row_is_the_median():
    assert Timing((3.0, 1.0, 2.0), ()).step_s == 2.0


def test_steps_beyond_the_context_are_refused():
    with pytest.raises(ValueError, match="100 decode steps do not fit into a context of 100"):
        time_decode(FakeEngine(), 1, 100, 1)
