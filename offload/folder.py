"""A model's folder and its `config.json`: what is looked at before anything else, and refused with a remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from offload.errors import ModelLoadError
from offload.text import shortened

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_folder(path: str | Path) -> Path:
    """Return the folder of a model.

    Raises:
        ModelLoadError: it is not a folder; a hub id is answered with the command that downloads it.
    """
    folder = expanded(path)
    if folder.is_dir():
        return folder
    text = str(path)
    if folder.is_file():
        raise ModelLoadError(f"{shortened(text)} is a file: give the folder that holds config.json")
    if _HUB_ID.fullmatch(text):
        target = text.split("/")[1]
        raise ModelLoadError(
            f"{shortened(text)} is no folder; if it names a model on the Hugging Face hub, download it first: "
            f"hf download {shortened(text)} --local-dir {shortened(target)}, and give that folder"
        )
    raise ModelLoadError(f"{shortened(text)} is no folder: give the one that holds config.json")


def expanded(path: str | Path) -> Path:
    """Return a path with `~` as the home folder that it stands for; as it is where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json`.

    Returns:
        Its entries, as they are.

    Raises:
        ModelLoadError: it is missing or not a JSON object.
    """
    return read_json_object(folder / "config.json", remedy="give a folder in the layout of Hugging Face")


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a file that must hold one JSON object.

    Raises:
        ModelLoadError: it is missing or holds something else; names the file and the remedy.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelLoadError(f"{shortened(str(path.parent))} has no {path.name}: {remedy}") from error
    except OSError as error:
        raise ModelLoadError(f"{path.name} cannot be read ({error.strerror}): {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path.name} is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} holds {shortened(value)}, not a JSON object: download it again")
    return value
