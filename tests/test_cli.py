"""The command line's frame: one line for whatever ends a run, the exit code, and no needless import."""

import os
import subprocess
import sys

import pytest

from offload import __version__, cli
from offload.errors import ModelLoadError, OffloadConfigError, OffloadConfigWarning


def buffered():
    """The environment in which a user's Python buffers its output."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def one_line(captured):
    lines = captured.err.splitlines()
    assert len(lines) == 1 and "Traceback" not in captured.err
    return lines[0]


@pytest.fixture
def ending(monkeypatch):
    """Make `inspect` end as the test says."""

    def install(error):
        def run(arguments):
            raise error

        monkeypatch.setattr(cli, "_run", lambda argv: run(argv))

    return install


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OffloadConfigError("bad config"), 2, "offload: fatal: bad config"),
        (ModelLoadError("no folder"), 3, "offload: fatal: no folder"),
        (ValueError("prompt too long"), 1, "offload: fatal: prompt too long"),
        (RuntimeError("two\n  lines"), 1, "offload: fatal: two lines"),
        (MemoryError(), 1, "offload: fatal: MemoryError"),
        (OSError(28, "No space left on device"), 1, "offload: fatal: [Errno 28] No space left on device"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_what_ends_a_run_is_one_line_and_a_code(ending, capsys, error, code, line):
    ending(error)
    assert cli.main([]) == code
    assert one_line(capsys.readouterr()) == line


def test_an_interrupt_is_130_without_a_word(ending, capsys):
    ending(KeyboardInterrupt())
    assert cli.main([]) == 130
    assert capsys.readouterr().err == ""


def test_a_defect_of_ours_is_not_hidden(ending):
    ending(AssertionError("slot holds another layer"))
    with pytest.raises(AssertionError):
        cli.main([])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "required: COMMAND, see `offload --help`"),
        (["unheard"], "invalid choice: 'unheard'"),
        (["--vers"], "required: COMMAND"),
        (["inspect"], "required: --offload-config, see `offload inspect --help`"),
        (["inspect", "--offload-config", "{}", "extra"], "unrecognized arguments: extra"),
        (["inspect", "--offload", "{}"], "required: --offload-config"),
        (["generate", "--prompt", "x"], "required: --model"),
        (
            ["generate", "--model", "m", "--prompt", "x", "--max-new-tokens", "0"],
            '"0" is not a whole number of at least',
        ),
        (["generate", "--model", "m", "--prompt", "x", "--max-new-tokens", "ten"], '"ten" is not a whole number'),
        (["generate", "--model", "m", "--prompt", "x", "--temperature", "nan"], '"nan" is not a number of at least 0'),
        (["generate", "--model", "m", "--prompt", "x", "--seed", "-1"], '"-1" is not a whole number of at least 0'),
        (["generate", "--model", "m", "--prompt", "x", "--load-format", "gguf"], "invalid choice: 'gguf'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_usage_errors_are_configuration_errors(capsys, argv, words):
    assert cli.main(argv) == 2
    line = one_line(capsys.readouterr())
    assert line.startswith("offload: fatal: ") and words in line


def test_long_arguments_are_cut(capsys):
    assert cli.main(["x" * 500]) == 2
    assert len(one_line(capsys.readouterr())) < 300


def test_warnings_are_one_line_each_and_said_whenever_they_come(monkeypatch, capsys):
    import warnings

    def run(argv):
        for _ in range(2):
            warnings.warn("one\ntwo", OffloadConfigWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(cli, "_run", run)
    assert cli.main([]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told == ["[offload] offload_config: one two"] * 2 + ["[offload] something else"]


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"offload {__version__}\n"


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert "inspect" in shown and "generate" in shown


def test_a_configuration_is_inspected_without_torch():
    code = (
        "import sys; from offload.cli import main\n"
        "status = main(['inspect', '--offload-config', sys.argv[1]])\n"
        "heavy = {'torch', 'triton', 'numpy', 'safetensors', 'transformers'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    command = [sys.executable, "-c", code, '{"uva": {"cpu_offload_gb": 1}}']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "backend   uva" in done.stdout


def test_a_closed_pipe_ends_it_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "offload", "inspect", "--offload-config", "{}"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered())
    os.close(writer)
    assert done.returncode == 141 and done.stderr == ""


def test_a_closed_pipe_does_not_hide_the_reason(tiny_folder):
    reader, writer = os.pipe()
    os.close(reader)
    config = '{"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["experts"]}}'
    command = [sys.executable, "-m", "offload", "inspect", "--offload-config", config, "--model", str(tiny_folder)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered())
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr.splitlines()[-1].startswith("offload: fatal: nothing would be offloaded")
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


def test_the_module_and_its_exit_code():
    done = subprocess.run(
        [sys.executable, "-m", "offload", "inspect", "--offload-config", "{"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "offload: fatal: Invalid JSON: EOF while parsing an object at line 1 column 1\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"], ids=["stdin", "stdout", "stderr"])
def test_a_stream_that_was_closed_before_is_not_missed(tiny_folder, closed):
    line = f'exec "$@" {closed}'
    generate = [sys.executable, "-m", "offload", "generate", "--model", str(tiny_folder), "--max-new-tokens", "1"]
    command = ["sh", "-c", line, "sh", *generate, "--prompt", "-", "--device", "cpu"]
    done = subprocess.run(command, input="" if closed == "<&-" else "Hi", capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    if closed == "<&-":
        assert (done.returncode, done.stderr) == (1, "offload: fatal: prompt 0 is empty: give at least one token\n")
    else:
        assert done.returncode == 0 and "[offload]" not in done.stdout


def test_nobody_reads_the_reason_and_the_code_still_tells_it():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "offload", "inspect", "--offload-config", "{"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, text=True)
    os.close(writer)
    assert done.returncode == 2 and done.stdout == ""
