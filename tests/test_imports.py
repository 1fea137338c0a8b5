"""The rooms of the house: imports point one way, and what only one room may do is done in no other."""

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = {"jinja2", "pydantic", "pydantic_core", "safetensors", "tokenizers", "torch", "tqdm", "triton"}
# What each room may import of the house and of its own dependencies; None: anything outside the house.
ROOMS = {
    "kernels/offload_kernels": ({"offload_kernels"}, {"torch", "triton"}),
    "offload": ({"offload_kernels", "offload"}, RUNTIME),
    "bench": ({"offload_kernels", "offload", "bench"}, None),
    "tests": ({"offload_kernels", "offload", "bench", "tests"}, None),
}
HOUSE = {"offload_kernels", "offload", "bench", "tests", "notebooks", "kernels"}
FILES = [(room, path) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path):
    """The modules that a file imports, wherever in it, as absolute names."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it points"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def first(name):
    return name.partition(".")[0]


def dotted(node):
    """`torch.cuda.is_available` of an attribute chain; empty for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def relative(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room):
    house, outside = ROOMS[room]
    for path in [path for of, path in FILES if of == room]:
        for name in map(first, imported(path)):
            if name in HOUSE:
                assert name in house, f"{relative(path)} imports {name}"
            elif outside is not None:
                known = name in outside or name in sys.stdlib_module_names
                assert known, f"{relative(path)} imports {name}, which is no dependency of {room}"


def test_every_room_was_entered():
    assert {room for room, _ in FILES} == set(ROOMS)


def test_every_file_says_what_it_is():
    silent = [relative(path) for _, path in FILES if path.stat().st_size and not ast.get_docstring(tree(path))]
    assert silent == []


def test_no_module_is_called_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    users = [relative(path) for _, path in FILES if "kernels" in map(first, imported(path))]
    assert users == [], "that import name belongs to another project"


def test_only_the_cuda_device_calls_torch_cuda():
    for room, path in FILES:
        if room != "offload" or relative(path) == "offload/cuda.py":
            continue
        chains = {dotted(node) for node in ast.walk(tree(path))}
        names = chains | set(imported(path))
        assert not any(f"{name}.".startswith("torch.cuda.") for name in names), relative(path)


def test_only_a_device_object_hands_data_to_python():
    devices = {"offload/cpu.py", "offload/cuda.py", "offload/virtual/device.py"}
    forbidden = {"tolist", "item", "cpu", "numpy"}
    for room, path in FILES:
        if room == "offload" and relative(path) not in devices:
            used = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)} & forbidden
            assert not used, f"{relative(path)} calls .{used.pop()}"


def test_the_backends_do_not_know_each_other_nor_the_models_them():
    def importers(*modules):
        return {
            relative(path)
            for _, path in FILES
            for name in imported(path)
            if any(f"{name}.".startswith(f"{module}.") for module in modules)
        }

    assert "offload/uva.py" not in importers("offload.prefetch")
    assert "offload/prefetch.py" not in importers("offload.uva")
    models = {path for path in importers("offload.uva", "offload.prefetch") if path.startswith("offload/models/")}
    assert models == set()
