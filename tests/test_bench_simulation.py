"""The bench of the virtual GPU's own speed."""

import json

import pytest

from bench import simulation
from bench.readme import FIGURES

pytestmark = pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")


def test_decode_steps_of_a_model_that_is_not_there_are_timed():
    samples = simulation.decode_steps("llama-3.1-8b", simulation.HALF, steps=2)
    assert len(samples) == 2 and min(samples) > 0


def test_a_command_is_timed_whole_and_its_failure_is_told():
    samples, printed = simulation.whole("offload --version", 2)
    assert len(samples) == 2 and min(samples) > 0 and printed.strip()
    with pytest.raises(RuntimeError, match="python -m offload inspect failed: offload: fatal"):
        simulation.whole("offload inspect", 1)


def test_what_was_timed_is_printed_saved_and_made_figures_of(tmp_path, monkeypatch, capsys):
    found = [simulation.Figure("a step", (0.5, 0.1, 0.2), 1.0), simulation.Figure("a sweep", (9.0,), 8.0, 60)]
    monkeypatch.setattr(simulation, "measure", lambda steps, repetitions: found)
    assert simulation.main(["--save", str(tmp_path / "simulation.json")]) == 0
    out = capsys.readouterr().out
    assert "| a step | 0.200 | 0.100 | 0.500 | 1 |" in out and "| a sweep, 60 rows | 9.000 |" in out
    kept = json.loads((tmp_path / "simulation.json").read_text())
    assert "python -m bench step " in kept["commands"]["sweep"]
    assert FIGURES["simulation"](kept) == [
        ("real time of: a step", 0.2, 1.0, " s", True),
        ("real time of: a sweep", 9.0, 8.0, " s", True),
    ]
