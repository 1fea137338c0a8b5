"""The tensors of a Hugging Face folder: which files hold them, and whether they are the ones that the model needs.

Everything here looks at names, headers and sizes only, so that a folder is refused before any memory is reserved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from offload.device import Device
from offload.errors import ModelLoadError
from offload.folder import read_json_object
from offload.models.base import Architecture, Slice
from offload.reader import Reader
from offload.shard import Entry, cut, read_shard
from offload.text import quoted, shortened

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_SHOWN = 3


@dataclass(frozen=True)
class SafetensorsFolder:
    """The tensors of a folder, by name; their headers are read, their bytes are not."""

    entries: Mapping[str, Entry]

    def reader(self, device: Device) -> Reader:
        """Return what reads these tensors into memory of the host or of `device`; the caller closes it."""
        return Reader(self.entries, device)

    def check(self, model: Architecture) -> None:
        """Compare the files with the model; nothing is read or reserved.

        Raises:
            ModelLoadError: a tensor is missing, unexpected, or of another shape or dtype; names the file and tensor.
        """
        model.choose_layout(self.entries)
        expected = model.checkpoint_slices()
        faults = [
            *_missing(expected, self.entries),
            *_unexpected(expected, self.entries, model.ignored),
            *_unlike(expected, self.entries),
        ]
        if faults:
            shown = "; ".join(faults[:_SHOWN])
            more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise ModelLoadError(f"{shown}{more}: use the config.json and the files of one checkpoint")


def open_checkpoint(folder: Path) -> SafetensorsFolder:
    """Find the safetensors files of a folder and read their headers.

    Raises:
        ModelLoadError: there are none (or only pickles), one is missing or damaged, or the index is wrong.
    """
    if (folder / INDEX).is_file():
        return SafetensorsFolder(_indexed(folder))
    return SafetensorsFolder(_unindexed(folder))


def _indexed(folder: Path) -> dict[str, Entry]:
    index = read_json_object(folder / INDEX, remedy="download it again")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(label, str) for label in weight_map.values()):
        raise ModelLoadError(f"{INDEX} has no weight_map from tensor names to file names: download it again")
    labels = sorted(set(weight_map.values()))
    for label in labels:
        _require_inside(label)
    shards = {label: read_shard(folder / label, cut(label)) for label in labels}
    for name, label in weight_map.items():
        if name not in shards[label]:
            raise ModelLoadError(
                f"{shortened(label)} has no tensor {shortened(name)}, but {INDEX} says so: download both again"
            )
    # A tensor that the index leaves out is judged like any other; one that is in two files is where the index says.
    found = {name: entry for shard in shards.values() for name, entry in shard.items()}
    return found | {name: shards[label][name] for name, label in weight_map.items()}


def _require_inside(label: str) -> None:
    """Refuse a path that leaves the folder as it is written. Links are the owner's: the hub's cache is made of them."""
    path = PurePosixPath(label)
    inside = path.name and not path.is_absolute() and ".." not in path.parts
    if not inside or "\\" in label or not label.isprintable():
        raise ModelLoadError(f"{INDEX}: the path {shortened(label)} leaves the folder: do not use this checkpoint")
    if path.suffix != ".safetensors":
        raise ModelLoadError(f"{INDEX}: {shortened(label)} is no .safetensors file: save the model as safetensors")


def _unindexed(folder: Path) -> dict[str, Entry]:
    paths = sorted(folder.glob("*.safetensors"))
    # Mistral ships the same weights a second time, in its own layout and under this name.
    paths = [path for path in paths if not path.name.startswith("consolidated")] or paths
    if not paths:
        raise ModelLoadError(_no_files(folder))
    _require_all_numbers([path.name for path in paths])
    found: dict[str, Entry] = {}
    for path in paths:
        for name, entry in read_shard(path, cut(path.name)).items():
            if name in found:
                raise ModelLoadError(
                    f"tensor {shortened(name)} is in {found[name].label} and in {entry.label}, and there is no "
                    f"{INDEX}: remove the file that does not belong to the model"
                )
            found[name] = entry
    return found


def _no_files(folder: Path) -> str:
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{shortened(str(folder))} holds its weights as pickle only ({quoted(pickles, 1)}), which can run code "
            "when it is read: convert it with transformers, from_pretrained(...).save_pretrained(...)"
        )
    return f"{shortened(str(folder))} has no .safetensors file: download the weights, or use load_format dummy"


def _require_all_numbers(labels: Iterable[str]) -> None:
    matches = [match for label in labels if (match := _NUMBERED.fullmatch(label))]
    present = {match[0] for match in matches}
    for match in matches:
        width = len(match["number"])
        for number in range(1, int(match["count"]) + 1):
            label = f"{match['stem']}-{number:0{width}}-of-{match['count']}.safetensors"
            if label not in present:
                raise ModelLoadError(f"missing shard {label}: download it again")


def _missing(expected: Mapping[str, Slice], entries: Mapping[str, Entry]) -> list[str]:
    names = [name for name in expected if name not in entries]
    if not names:
        return []
    files = sorted({entry.label for entry in entries.values()})
    return [f"missing tensor {quoted(names, _SHOWN)} (looked in {quoted(files, 1) if files else 'an empty file'})"]


def _unexpected(
    expected: Mapping[str, Slice], entries: Mapping[str, Entry], ignored: Callable[[str], bool]
) -> list[str]:
    extra = [entry for name, entry in entries.items() if name not in expected and not ignored(name)]
    names = quoted([entry.name for entry in extra], _SHOWN)
    return [f"{extra[0].label}: unexpected tensor {names}"] if extra else []


def _unlike(expected: Mapping[str, Slice], entries: Mapping[str, Entry]) -> list[str]:
    faults = []
    for name, place in expected.items():
        entry = entries.get(name)
        if entry is None:
            continue
        if entry.shape != place.shape:
            faults.append(
                f"{entry.label}: tensor {shortened(name)} has shape {list(entry.shape)}, "
                f"config.json needs {list(place.shape)}"
            )
        elif entry.dtype is None:
            faults.append(
                f"{entry.label}: tensor {shortened(name)} is {shortened(entry.dtype_name)}, not a float of 16 bits or "
                "more (quantised checkpoints are not supported yet)"
            )
    return faults
