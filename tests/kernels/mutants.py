"""Kernels with one fault put in: the proof of a check is that it turns red on them."""

import importlib
import importlib.util
from hashlib import sha256
from pathlib import Path
from types import ModuleType


def mutant(module: str, old: str, new: str, folder: Path) -> ModuleType:
    """A copy of a kernel module with one piece of its text replaced, under another name.

    Args:
        module: Its full name, such as ``offload_kernels.skinny``.
        old: What is replaced; it must occur in the source.
        new: What stands there instead.
        folder: Where the copy is written: Triton reads a kernel's source from its file.
    """
    source = Path(importlib.import_module(module).__file__).read_text(encoding="utf-8")
    assert old in source, f"{module} no longer contains {old!r}: the mutant tests nothing"
    text = source.replace(old, new)
    # Named by its text: Triton caches what it compiled by text too, with the file's name in it.
    path = folder / f"mutant_{sha256(text.encode()).hexdigest()[:16]}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
