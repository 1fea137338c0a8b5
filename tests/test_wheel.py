"""The built wheel: two packages, whole, and no third."""

import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "offload", "kernels", "bench", "tests", "notebooks")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy, so that no build folder of an earlier build is in it."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(target), str(source)], check=True, capture_output=True)
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def read(wheel, suffix):
    (name,) = [name for name in wheel.namelist() if name.endswith(suffix)]
    return wheel.read(name).decode()


def test_the_top_level_is_the_two_packages(wheel):
    top = {name.partition("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"offload", "offload_kernels"}
    assert read(wheel, "top_level.txt").split() == ["offload", "offload_kernels"]


def test_every_source_file_is_in_it(wheel):
    for root, package in ((ROOT, "offload"), (ROOT / "kernels", "offload_kernels")):
        files = [path for path in (root / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        expected = {path.relative_to(root).as_posix() for path in files}
        present = {name for name in wheel.namelist() if name.startswith(f"{package}/")}
        assert present == expected


def test_what_it_says_of_itself(wheel):
    metadata = message_from_string(read(wheel, "METADATA"))
    assert (metadata["Name"], metadata["License-Expression"]) == ("weight-offload", "Apache-2.0")
    needs = {text.split(";")[0].strip() for text in metadata.get_all("Requires-Dist") if "extra ==" not in text}
    assert needs == {
        "torch>=2.11",
        "triton>=3.6",
        "safetensors",
        "pydantic>=2.12",
        "tokenizers",
        "jinja2",
        "tqdm",
    }
    assert "offload = offload.cli:main" in read(wheel, "entry_points.txt")
    assert "Apache License" in read(wheel, "licenses/LICENSE")


def test_it_works_from_where_it_is_unpacked(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import offload, offload_kernels\n"
        "assert offload.__file__.startswith(sys.argv[1]) and offload_kernels.__file__.startswith(sys.argv[1])\n"
        "from offload.cli import main; sys.exit(main(['inspect', '--offload-config', '{}']))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
