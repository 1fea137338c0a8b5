"""Every notebook runs from top to bottom in a fresh kernel, and is committed with what it printed and drew."""

import re

import nbformat
import pytest

from bench.machine import REPOSITORY
from bench.notebooks import executed, notebooks

NAMES = [path.name for path in notebooks()]


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def pictures(notebook):
    return [output for output in outputs(notebook) if "image/png" in output.get("data", {})]


@pytest.mark.parametrize("path", notebooks(), ids=NAMES)
def test_runs_and_draws_as_many_pictures_as_are_committed(path):
    fresh, committed = executed(path), nbformat.read(path, as_version=4)
    assert pictures(fresh) and len(pictures(fresh)) == len(pictures(committed))
    assert [output.text for output in outputs(fresh) if output.get("name") == "stderr"] == []


@pytest.mark.parametrize("path", notebooks(), ids=NAMES)
def test_is_committed_executed_in_order_and_without_this_machines_paths(path):
    committed = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in committed.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert pictures(committed)
    text = " ".join(
        str(output.get("text", output.get("data", {}).get("text/markdown", ""))) for output in outputs(committed)
    )
    assert str(REPOSITORY) not in text and not re.search(r"(?<![\w.])/(home|root|tmp|work)/", text)


@pytest.mark.parametrize("path", notebooks(), ids=NAMES)
def test_begins_with_its_number_as_its_title(path):
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown" and first.source.startswith(f"# {path.name[:2]} ")
