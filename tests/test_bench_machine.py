"""The machine card and the result document."""

import json
import os
import platform
import re

import pytest

from bench import machine


def test_card_describes_the_machine_and_tells_no_names_or_places():
    text = json.dumps(machine.document("budget", ["--model", os.getcwd()], [], note="x"))
    assert platform.node() not in text
    assert not re.search(r'"/[a-z]|[ =@"]/(home|work|root|tmp|usr)/', text)


def test_document_has_what_makes_a_number_meaningful():
    result = machine.document("budget", ["-r", "3"], [{"step_s": 1.0}], bound_s=2.0)
    assert result["command"] == "python -m bench budget -r 3"
    assert {"command", "commit", "machine", "versions", "rows"} <= set(result)
    assert result["bound_s"] == 2.0 and result["rows"] == [{"step_s": 1.0}]
    assert {"python", "torch"} <= set(result["versions"])
    assert result["machine"]["cores"] >= 1 and result["machine"]["memory_bytes"] > 2**28


@pytest.mark.parametrize(
    ("word", "portable"),
    [
        (str(machine.REPOSITORY / "examples" / "m"), "examples/m"),
        ("/data/models/llama", "llama"),
        ("@/data/config.json", "@config.json"),
        ("--save=/data/out.json", "--save=out.json"),
        ("~/models/llama", "llama"),
        ('{"uva": {"cpu_offload_gb": 1}}', '{"uva": {"cpu_offload_gb": 1}}'),
        ("0-2+0.5", "0-2+0.5"),
        ("examples/m", "examples/m"),
    ],
)
def test_a_command_keeps_its_words_but_not_this_machines_folders(word, portable):
    assert machine.portable(word) == portable


def test_save_is_whole_or_not_at_all(tmp_path, capsys):
    target = tmp_path / "results" / "a.json"
    machine.save({"rows": [1]}, target)
    with pytest.raises(ValueError, match="not JSON compliant"):
        machine.save({"rows": [float("nan")]}, target)
    assert json.loads(target.read_text()) == {"rows": [1]}
    assert [path.name for path in target.parent.iterdir()] == ["a.json"]
    captured = capsys.readouterr()
    assert captured.out == "" and "a.json" in captured.err
