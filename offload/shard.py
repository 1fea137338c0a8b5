"""One `.safetensors` file: its header, checked, as a list of where each tensor's bytes are.

The safetensors library judges the header (sizes, overlaps, holes, dtypes). The offsets are then taken from it by hand,
because the bytes are to be read straight into their destination, for which the library has no call.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from offload.errors import ModelLoadError
from offload.text import shortened

FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes that a weight may have in a file; everything else there is quantised, or not a weight."""

_LENGTH_BYTES = 8
_LARGEST_HEADER_BYTES = 100_000_000  # what the library accepts
_AGAIN = "download it again"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        name: the checkpoint's name for it.
        path, label: the file, and how messages call it.
        dtype_name: as the header writes it, "BF16".
        shape: of the tensor.
        offset_bytes: of its first byte in the file.
        nbytes: its size.
    """

    name: str
    path: Path
    label: str
    dtype_name: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        """Its torch dtype, None where a weight cannot have it."""
        return FLOATING.get(self.dtype_name)


def cut(label: str) -> str:
    """A file's name as messages show it, on one line of a sensible length."""
    return shortened(label).strip('"')


def read_shard(path: Path, label: str) -> dict[str, Entry]:
    """Read the header of one file; no tensor is read.

    Args:
        path: the file.
        label: how messages call it.

    Returns:
        Its tensors by name.

    Raises:
        ModelLoadError: it is missing, truncated, or its header is damaged.
    """
    try:
        with open(path, "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH_BYTES)
            length_bytes = int.from_bytes(prefix, "little")
            room_bytes = size_bytes - _LENGTH_BYTES - length_bytes
            has_header = len(prefix) == _LENGTH_BYTES and room_bytes >= 0 and length_bytes <= _LARGEST_HEADER_BYTES
            text = file.read(length_bytes) if has_header else None
    except FileNotFoundError as error:
        raise ModelLoadError(f"missing shard {label}: {_AGAIN}") from error
    except OSError as error:
        raise ModelLoadError(f"{label} cannot be read ({error.strerror}): check its permissions") from error
    if text is None:
        raise ModelLoadError(_no_header(label, prefix, size_bytes))
    header = _parsed(text)
    _require_whole(label, header, room_bytes)
    try:
        with safe_open(path, framework="pt") as judged:
            names = set(judged.keys())
        return _entries(path, label, header, names, size_bytes - room_bytes)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        reason = shortened(" ".join(str(error).split()))
        raise ModelLoadError(f"{label}: its header is damaged ({reason}): {_AGAIN}") from error


def _no_header(label: str, prefix: bytes, size_bytes: int) -> str:
    if prefix == b"version ":
        return f"{label} is a Git LFS pointer, not the weights: run git lfs pull"
    if len(prefix) < _LENGTH_BYTES:
        return f"{label} is truncated: it has {size_bytes} bytes: {_AGAIN}"
    needed = int.from_bytes(prefix, "little") + _LENGTH_BYTES
    return f"{label} is truncated or no safetensors file: its header ends at byte {needed} of {size_bytes}: {_AGAIN}"


def _parsed(text: bytes) -> dict[str, Any]:
    """The header as Python values, without the metadata; empty where it is no JSON object (the library says why)."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {name: value for name, value in header.items() if name != "__metadata__"} if isinstance(header, dict) else {}


def _require_whole(label: str, header: dict[str, Any], room_bytes: int) -> None:
    """Refuse a file that ends before its tensors do, naming the first that is cut."""
    ends = []
    for name, value in header.items():
        offsets = value.get("data_offsets") if isinstance(value, dict) else None
        if isinstance(offsets, list) and len(offsets) == 2 and isinstance(offsets[1], int) and offsets[1] > room_bytes:
            ends.append((offsets[1], name))
    if ends:
        end, name = min(ends)
        raise ModelLoadError(
            f"{label} is truncated: tensor {shortened(name)} ends {end - room_bytes} bytes after the file: {_AGAIN}"
        )


def _entries(path: Path, label: str, header: dict[str, Any], names: set[str], start_bytes: int) -> dict[str, Entry]:
    if names != header.keys():
        raise ValueError("two readers find different tensors in it")
    found = {}
    for name, value in header.items():
        begin, end = value["data_offsets"]
        found[name] = Entry(name, path, label, value["dtype"], tuple(value["shape"]), start_bytes + begin, end - begin)
    return found
