"""The bench of the hooks: every arm is measured, and what it prints can be read back."""

import json

import pytest

from bench.hooks import ARMS, main


def test_every_arm_has_a_row(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    path = tmp_path / "hooks.json"
    assert main(["--layers", "2", "--passes", "1", "-r", "2", "-o", "json", "--save", str(path)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["backend"] for row in rows] == list(ARMS)
    assert all(len(row["samples_s"]) == 2 for row in rows)
    saved = json.loads(path.read_text())
    assert saved["rows"] == rows and saved["command"].startswith("python -m bench hooks --layers 2")


def test_the_table_names_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--layers", "1", "--passes", "1", "-r", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-len(ARMS) - 2].endswith("target us |") and all(
        line.endswith("15.0 |") for line in lines[-len(ARMS) :]
    )
