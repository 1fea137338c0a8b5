"""Execute the notebooks and keep their outputs, so that what is read was run: `python -m bench notebooks [01 ...]`.

Without numbers all of them run. Nothing of the machine but what a notebook prints itself stays in the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import arguments
from bench.machine import REPOSITORY
from offload.errors import OffloadConfigError

FOLDER = REPOSITORY / "notebooks"
LIMIT_S = 300


def notebooks() -> list[Path]:
    """Every notebook, in order of its number."""
    return sorted(FOLDER.glob("[0-9][0-9]-*.ipynb"))


def executed(path: Path) -> Any:
    """Run a notebook from its own folder in a fresh kernel; returns it with its outputs.

    Raises:
        CellExecutionError: a cell failed.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    found = os.environ.get("PYTHONPATH")
    places = [str(REPOSITORY), str(REPOSITORY / "kernels"), *([found] if found else [])]
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources=resources, record_timing=False)
    client.execute(env={**os.environ, "PYTHONPATH": os.pathsep.join(places)})
    notebook.metadata.get("language_info", {}).pop("version", None)
    return notebook


def main(argv: Sequence[str]) -> int:
    """Run `python -m bench notebooks`; returns the exit code."""
    parser = arguments.parser("notebooks", __doc__)
    parser.add_argument("numbers", nargs="*", metavar="NN", help="which ones (default: all)")
    wanted = parser.parse_args(argv).numbers
    chosen = [path for path in notebooks() if not wanted or path.name[:2] in wanted]
    if len(chosen) < len(wanted):
        raise OffloadConfigError(f"there are notebooks {', '.join(path.name for path in notebooks())}: give two digits")
    import nbformat

    for path in chosen:
        nbformat.write(executed(path), path)
        print(f"executed {path.name}", file=sys.stderr)
    return 0
