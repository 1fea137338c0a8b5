"""What the documents promise: links that lead somewhere, commands that exist, numbers that were measured."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "kernels" / "README.md") if path.exists()
]
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
MEASURED = re.compile(r"\d[\d.,]*[^\S\n]*(?:tok/s|tokens/s|GB/s|MB/s|GiB/s|TFLOP/s|ms\b|µs\b|us\b|%|×|x\b)")
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:home|root|work|tmp|mnt|data|Users)/")


def sections(text):
    """The text under each heading, with the heading."""
    return re.split(r"(?m)^(?=#{1,6} )", text)


def unsourced(text):
    """Measured numbers in sections that link to no file of results."""
    without = [part for part in sections(text) if not any("bench/results/" in link for link in LINK.findall(part))]
    return [number for part in without for number in MEASURED.findall(part)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files(document):
    for link in LINK.findall(document.read_text()):
        if not link.startswith(("http://", "https://", "mailto:")):
            assert (document.parent / link).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_measured_numbers_have_their_source(document):
    assert unsourced(document.read_text()) == []


def test_the_rule_for_numbers_finds_what_it_is_for():
    assert unsourced("# a\n12.5 tok/s\n# b\n[file](bench/results/x.json) 3 GB/s") == ["12.5 tok/s"]
    assert unsourced("group 4 of 8, 135M parameters, Python 3.11, 2 cores") == []


def test_results_hold_no_absolute_path():
    results = [
        path for path in (ROOT / "bench" / "results").rglob("*") if path.suffix in {".json", ".jsonl", ".csv", ".md"}
    ]
    for path in results:
        found = ABSOLUTE.search(path.read_text())
        assert found is None, f"{path.relative_to(ROOT)}: {found}"


def test_commands_exist():
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    targets = set(re.findall(r"(?m)^(\w[\w-]*):", (ROOT / "Makefile").read_text())) | {"test-main", "test-interpret"}
    assert set(re.findall(r"(?m)(?:^ {4}|`)make (\w+)", text)) <= targets
    benches = {path.stem.replace("_", "-") for path in (ROOT / "bench").glob("*.py")}
    assert {name.replace("_", "-") for name in re.findall(r"-m bench ([\w-]+)", text)} <= benches
    commands = {path.stem for path in (ROOT / "offload" / "commands").glob("*.py")}
    assert set(re.findall(r"(?m)^\s*(?:python -m )?offload (\w+) --", text)) <= commands


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 60


def test_python_in_the_readme_is_python():
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S):
        ast.parse(block)


def test_the_top_level_folders_are_the_rooms():
    tracked = {"offload", "kernels", "bench", "tests", "notebooks", ".ci"}
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    extra = {name for name in folders - tracked - ignored if name != ".git" and not name.endswith(".egg-info")}
    assert extra == set()
