"""The command line: finds the subcommand, runs it, and turns whatever ends it into one line and an exit code.

A subcommand is a module in `offload/commands/` whose docstring's first line is its help, with `add_arguments(parser)`
and `run(arguments) -> exit code`. Those modules import torch only when they run, so that what needs none stays quick.
"""

import argparse
import importlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn, TextIO

from offload import __version__, commands
from offload.errors import ModelLoadError, OffloadConfigError, OffloadConfigWarning

EXIT_GENERATION = 1
EXIT_CONFIG = 2
EXIT_LOAD = 3
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class _Parser(argparse.ArgumentParser):
    """An argument parser whose refusals are a usage error like any other, in one line."""

    def error(self, message: str) -> NoReturn:
        words = (word if len(word) <= 80 else word[:77] + "..." for word in message.split())
        raise OffloadConfigError(f"{' '.join(words)}, see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments, without the program's name; None for the process's own.

    Returns:
        The exit code: 0; 1 if generating failed; 2 for a wrong configuration or usage; 3 if the model cannot be loaded;
        130 after Ctrl-C; 141 if the reader of stdout left.
    """
    _open_missing_streams()
    with warnings.catch_warnings():
        warnings.simplefilter("always", OffloadConfigWarning)
        warnings.showwarning = _print_warning
        code = _exit_code(lambda: _run(argv))
        return _exit_code(lambda: _flushed(code))


def _open_missing_streams() -> None:
    """Python has None for a stream that was closed before the process began (`>&-`): nothing is there to use."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="offload", description="LLM weight offloading.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"offload {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in _subcommands().items():
        summary, _, description = (module.__doc__ or "").partition("\n")
        subparser = subparsers.add_parser(
            name, help=summary, description=f"{summary}\n{description}", allow_abbrev=False, formatter_class=_HELP
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


_HELP = argparse.RawDescriptionHelpFormatter


def _subcommands() -> dict[str, ModuleType]:
    names = sorted(info.name for info in pkgutil.iter_modules(commands.__path__) if not info.name.startswith("_"))
    return {name: importlib.import_module(f"{commands.__name__}.{name}") for name in names}


def _exit_code(run: Callable[[], int]) -> int:
    try:
        return run()
    except OffloadConfigError as error:
        return _fatal(error, EXIT_CONFIG)
    except ModelLoadError as error:
        return _fatal(error, EXIT_LOAD)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard(sys.__stdout__)
        return EXIT_BROKEN_PIPE
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        return _fatal(error, EXIT_GENERATION)


def _flushed(code: int) -> int:
    sys.stdout.flush()
    return code


def _discard(stream: TextIO) -> None:
    """Give a stream's buffer somewhere to go: the interpreter flushes it once more at exit, and the reader has left."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _say(line: str) -> None:
    """Print to stderr; if nobody reads it, the exit code still says what happened."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.__stderr__)


def _fatal(error: BaseException, code: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    _say(f"offload: fatal: {text}")
    return code


def _print_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    subject = "offload_config: " if issubclass(category, OffloadConfigWarning) else ""
    _say(f"[offload] {subject}{' '.join(str(message).split())}")
