"""`offload generate`: text on stdout as it comes, one line of numbers on stderr, and every way it can end."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from offload import load
from offload.cli import main

UVA = '{"uva": {"cpu_offload_gb": 0.00005}}'
NUMBERS = re.compile(
    r"\[offload\] \d+ tokens, (no decode step|[\d.]+ tok/s), "
    r"\S+ GiB offloaded, \S+ GiB on the device, loaded in [\d.]+ s"
)


def generate(capsys, folder, *more, prompt="Hello"):
    code = main(["generate", "--model", str(folder), "--device", "cpu", "--prompt", prompt, *more])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("config", [None, UVA, '{"prefetch": {"offload_group_size": 2}}'])
def test_the_text_is_the_engines(capsys, tiny_folder, config):
    flags = ["--offload-config", config] if config else []
    code, out, err = generate(capsys, tiny_folder, "--max-new-tokens", "9", *flags)
    with load(str(tiny_folder), config, device="cpu") as engine:
        expected = engine.generate(["Hello"], 9)[0].text
    assert code == 0 and len(expected) > 3
    assert out.removesuffix("\n").rstrip("\ufffd") == expected.rstrip("\ufffd")
    assert NUMBERS.fullmatch(err.splitlines()[-1])


def test_a_prompt_from_stdin(capsys, monkeypatch, tiny_folder):
    _, expected, _ = generate(capsys, tiny_folder, "--max-new-tokens", "5")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    assert generate(capsys, tiny_folder, "--max-new-tokens", "5", prompt="-")[:2] == (0, expected)


def test_a_simulations_speed_is_called_that(capsys, tiny_folder):
    flags = ("--device", "virtual:h200-pcie5", "--max-new-tokens", "3")
    code, _, err = generate(capsys, tiny_folder, *flags)
    assert code == 0 and "tok/s of the simulation itself" in err.splitlines()[-1]


def test_chat_uses_the_template(capsys, tiny_folder):
    _, expected, _ = generate(capsys, tiny_folder, "--max-new-tokens", "5", prompt="<user>Hello")
    code, out, _ = generate(capsys, tiny_folder, "--max-new-tokens", "5", "--chat")
    assert (code, out) == (0, expected)


@pytest.mark.parametrize("errors", ["surrogateescape", "strict"])
def test_a_prompt_that_is_no_text_is_refused_before_the_model_is_looked_for(capsys, monkeypatch, errors):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"h\xff"), "utf-8", errors))
    code = main(["generate", "--model", "/no/such/folder", "--prompt", "-"])
    said = "offload: fatal: the prompt has bytes that are not UTF-8 text: convert it to UTF-8\n"
    assert (code, capsys.readouterr().err) == (1, said)


def test_a_seed_repeats(capsys, tiny_folder):
    flags = ("--max-new-tokens", "12", "--temperature", "5", "--seed")
    first, again, other = (generate(capsys, tiny_folder, *flags, seed)[1] for seed in ("3", "3", "4"))
    assert first == again != other


def test_dummy_weights_need_no_weight_files(capsys, tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    assert generate(capsys, folder, "--max-new-tokens", "2")[0] == 3
    assert generate(capsys, folder, "--max-new-tokens", "2", "--load-format", "dummy")[0] == 0


def test_warnings_of_the_configuration(capsys, tiny_folder):
    config = '{"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["mlp", "q_proj"]}}'
    code, _, err = generate(capsys, tiny_folder, "--max-new-tokens", "1", "--offload-config", config)
    assert code == 0
    assert '[offload] offload_config: selector "q_proj" matches no parameter of a decoder layer' in err


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--offload-config", "{]"], 2, "Invalid JSON"),
        (["--offload-config", '{"prefetch": {"offload_group_size": 99}}'], 2, "nothing would be offloaded"),
        (["--device", "tpu"], 3, "tpu"),
        (["--dtype", "int8"], 3, "int8"),
        (["--max-new-tokens", "200000"], 1, "the context is 100000"),
    ],
    ids=["config", "nothing", "device", "dtype", "context"],
)
def test_refusals(capsys, tiny_folder, flags, code, words):
    ended, out, err = generate(capsys, tiny_folder, *flags)
    assert (ended, out) == (code, "")
    assert err.splitlines()[-1].startswith("offload: fatal: ") and words in err


def test_an_invalid_configuration_is_refused_before_the_model_is_looked_for(capsys):
    code, _, err = generate(capsys, "/no/such/folder", "--offload-config", '{"uva": {"cpu_offload_gb": -1}}')
    assert code == 2 and "uva.cpu_offload_gb" in err
    assert generate(capsys, "/no/such/folder")[0] == 3


def test_a_configuration_from_a_file(capsys, tiny_folder, tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"uva": {"cpu_offload_gb": 1}}')
    code, _, err = generate(capsys, tiny_folder, "--max-new-tokens", "1", "--offload-config", f"@{file}")
    assert code == 0 and "0.000 GiB offloaded" not in err


def test_text_needs_a_tokenizer(capsys, tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "copy")
    (folder / "tokenizer.json").unlink()
    code, _, err = generate(capsys, folder)
    assert code == 3 and "tokenizer.json" in err


@pytest.fixture
def endless(tiny_folder):
    """A real process that is generating, and will be for long."""
    command = [sys.executable, "-m", "offload", "generate", "--model", str(tiny_folder), "--device", "cpu"]
    command += ["--prompt", "Hello", "--max-new-tokens", "90000", "--offload-config", UVA]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(command, **pipes, env=buffered) as process:
        assert process.stdout.read(1)
        yield process
        process.kill()


def test_ctrl_c_while_generating_is_130(endless):
    endless.send_signal(signal.SIGINT)
    out, err = endless.communicate(timeout=60)
    assert endless.returncode == 130
    assert len(out) < 4096, "the first text came with a full buffer, not when it was written"
    assert b"Traceback" not in err and b"fatal" not in err


def test_a_reader_that_leaves_ends_it_quietly(endless):
    endless.stdout.close()
    assert endless.wait(timeout=60) == 141
    err = endless.stderr.read()
    assert b"Traceback" not in err and b"Exception ignored" not in err
