"""The bench of the simulation's own time: every row has its limit, and a command that fails is no time."""

import json

import pytest

from bench import simulation
from bench.__main__ import main


def test_a_decode_step_is_timed(capsys, tmp_path):
    path = tmp_path / "simulation.json"
    assert main(["simulation", "--only", "70b", "-r", "2", "-o", "json", "--save", str(path)]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["limit_s"] == 1 and len(row["samples_s"]) == 2
    assert min(row["samples_s"]) <= row["wall_s"] <= max(row["samples_s"]) and row["cpu_s"] > 0
    assert json.loads(path.read_text())["rows"] == [row]


def test_the_sweep_has_sixty_configurations(monkeypatch):
    seen = []
    monkeypatch.setattr(simulation, "commands", lambda words, repetitions: seen.append(words) or [])
    simulation._sweep(1)
    from bench.step import configs_of, parse
    from bench.subject import subject_of

    args = parse(seen[0][2:])
    configs, _ = configs_of(args, subject_of(args))
    assert len(configs) == 60


def test_a_command_that_fails_is_no_time():
    with pytest.raises(RuntimeError, match="offload plan .* failed: .*no model configuration"):
        simulation.commands(["offload", "plan", "--model-config", "none", "--device", "virtual:gh200"], 1)


def test_an_unknown_name_lists_the_known(capsys):
    assert main(["simulation", "--only", "70b,400b"]) == 2
    assert "--only 400b is not known: choose of 70b, 235b, sweep, plan" in capsys.readouterr().err
