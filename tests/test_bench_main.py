"""`python -m bench`: the list, the dispatch, one line and an exit code for whatever ends a run."""

import sys
from types import SimpleNamespace

import pytest

from bench import __main__ as bench_main
from offload.errors import ModelLoadError, OffloadConfigError


@pytest.fixture
def a_bench(monkeypatch):
    """A bench called `probe_of_a_test` that raises what it is given."""

    def install(error):
        def run(argv):
            if error is not None:
                raise error
            return 7

        monkeypatch.setattr(bench_main, "benches", lambda: {"probe_of_a_test": "A test."})
        monkeypatch.setitem(sys.modules, "bench.probe_of_a_test", SimpleNamespace(main=run))

    return install


def test_listing_names_every_bench_and_no_helper(capsys):
    assert bench_main.main([]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert {"budget", "prepare"} <= set(listed)
    assert not {"rows", "machine", "plot", "ranges"} & set(listed)
    assert all(len(line.split()) > 3 for line in listed.values())


def test_the_bench_decides_the_exit_code(a_bench, capsys):
    a_bench(None)
    assert bench_main.main(["probe_of_a_test"]) == 7
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OffloadConfigError("no\n  such field"), 2, "no such field"),
        (ModelLoadError("no folder"), 3, "no folder"),
        (ValueError("too long"), 1, "too long"),
        (RuntimeError("lost"), 1, "lost"),
        (MemoryError(), 1, "MemoryError"),
        (ModuleNotFoundError("No module named 'x'", name="x"), 1, "x is missing: pip install -e '.[bench]'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_is_raised_is_one_line_and_a_code(a_bench, capsys, error, code, line):
    a_bench(error)
    assert bench_main.main(["probe_of_a_test"]) == code
    captured = capsys.readouterr()
    assert captured.err == f"offload: fatal: {line}\n" and captured.out == ""


def test_a_usage_error_is_one_line_with_long_words_cut(capsys):
    assert bench_main.main(["budget", "--model", "x", "y" * 500]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("offload: fatal: ") and len(line) < 200 and line.endswith("(see python -m bench budget --help)")
    )


def test_a_defect_keeps_its_traceback(a_bench):
    a_bench(AttributeError("a defect of ours"))
    with pytest.raises(AttributeError, match="a defect of ours"):
        bench_main.main(["probe_of_a_test"])


def test_an_unknown_bench_is_refused_with_the_nearest(capsys):
    assert bench_main.main(["budgte"]) == 2
    assert capsys.readouterr().err == "offload: fatal: no bench is called 'budgte': did you mean budget?\n"
