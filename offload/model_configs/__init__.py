"""Shipped `config.json` files of public models, by name: enough to plan and simulate them, without weights.

Each names its source under "source", a key that no architecture reads.
"""

from __future__ import annotations

from pathlib import Path

from offload.errors import ModelLoadError
from offload.text import shortened

_FOLDER = Path(__file__).parent


def shipped() -> list[str]:
    """Names of the shipped configurations."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def find(text: str) -> tuple[Path, str]:
    """Path and name of a model configuration.

    Args:
        text: a shipped name, or the path of a `config.json`, which is called by its folder, or of another JSON file.

    Raises:
        ModelLoadError: it is neither; the message lists the names.
    """
    path = _FOLDER / f"{text}.json"
    if "/" not in text and path.is_file():
        return path, text
    path = Path(text)
    if not path.is_file():
        known = ", ".join(shipped())
        remedy = f"give the path of a config.json, or one of {known}"
        raise ModelLoadError(f"no model configuration {shortened(text)}: {remedy}")
    return path, path.resolve().parent.name if path.name == "config.json" else path.stem
