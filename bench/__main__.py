"""Run one bench, `python -m bench NAME [options]`, or list them, `python -m bench`.

A bench is a file of this folder with a function `main(argv) -> int`. What it raises becomes one line and an exit code
here, the same for every bench, so that none of them prints a traceback for a caller's mistake.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.errors import ModelLoadError, OffloadConfigError, OffloadConfigWarning

FOLDER = Path(__file__).resolve().parent
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
BROKEN_PIPE = 141  # 128 + SIGPIPE


def benches() -> dict[str, str]:
    """Map the name of every bench to the first line of its docstring; imports none of them."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.name.startswith("__"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def listing() -> str:
    """The text that `python -m bench` prints."""
    known = benches()
    width = max(map(len, known))
    lines = [f"  {name:<{width}}  {first_line}" for name, first_line in known.items()]
    return "\n".join(["usage: python -m bench NAME [options]", "", *lines, "", "python -m bench NAME --help has more."])


def fatal(message: object) -> None:
    """Print the one line that ends a run that cannot go on, in the form of `python -m offload`."""
    text = " ".join(str(message).split()) or type(message).__name__
    sys.stdout.flush()
    print(f"offload: fatal: {text}", file=sys.stderr)


def print_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Print a warning on one line, in the form of `python -m offload`."""
    subject = "offload_config: " if issubclass(category, OffloadConfigWarning) else ""
    print(f"[offload] {subject}{' '.join(str(message).split())}", file=sys.stderr)


def run(name: str, argv: Sequence[str]) -> int:
    """Run one bench and turn what it raises into an exit code: 2 usage or config, 3 loading, 1 others, 130 Ctrl-C."""
    try:
        code = importlib.import_module(f"bench.{name}").main(list(argv))
        sys.stdout.flush()
        return code
    except OffloadConfigError as error:
        fatal(error)
        return 2
    except ModelLoadError as error:
        fatal(error)
        return 3
    except KeyboardInterrupt:
        fatal("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (`| head`) has seen enough; the interpreter must not fail again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        fatal(error)
        return 1
    except ModuleNotFoundError as error:
        fatal(f"{error.name} is missing: pip install -e '.[bench]'")
        return 1


def main(argv: Sequence[str]) -> int:
    """Dispatch; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, known = argv[0], benches()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        fatal(f"no bench is called {name[:80]!r}: {remedy}")
        return 2
    with warnings.catch_warnings():
        warnings.showwarning = print_warning
        return run(name, argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
