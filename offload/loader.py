"""Loading weights: the architecture asks the backend where each one goes, a source fills it there.

Two steps, because a folder must be refused before memory is reserved: `open_source` and its `check` look at names and
sizes only, `load_weights` moves the bytes when the destinations exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Literal, Protocol, get_args

from torch import Tensor
from tqdm import tqdm

from offload.checkpoint import open_checkpoint
from offload.device import Device
from offload.dummy import DummyWeights, NoWeights
from offload.errors import ModelLoadError
from offload.models.base import Architecture, Checkpoint
from offload.text import quoted, shortened

LoadFormat = Literal["safetensors", "dummy", "meta"]


class WeightReader(Checkpoint, Protocol):
    """A checkpoint that holds files, buffers or threads until it is closed."""

    def close(self) -> None:
        """Give them back; what was read is in its place then."""


class WeightSource(Protocol):
    """Where weights come from: a folder's files, random numbers, or nowhere."""

    def check(self, model: Architecture) -> None:
        """Refuse a source that does not have what `model` needs, before any memory is reserved."""

    def reader(self, device: Device) -> WeightReader:
        """Return what fills destinations on the host or on `device`."""


def open_source(folder: Path, load_format: LoadFormat = "safetensors") -> WeightSource:
    """Open what `load_weights` reads from.

    Args:
        folder: the model's folder.
        load_format: "safetensors" reads its files; "dummy" needs none and makes seeded random weights; "meta" fills
            nothing, for a virtual GPU.

    Returns:
        The source; its `check` is next.

    Raises:
        ModelLoadError: the folder's files are missing or damaged.
        ValueError: there is no such format.
    """
    if load_format == "safetensors":
        return open_checkpoint(folder)
    if load_format == "dummy":
        return DummyWeights()
    if load_format == "meta":
        return NoWeights()
    raise ValueError(f"no load format {shortened(load_format)}: choose one of {', '.join(get_args(LoadFormat))}")


def load_weights(
    source: WeightSource, model: Architecture, destination: Callable[[str], Tensor], device: Device
) -> None:
    """Fill every weight of `model`; when this returns, all of them are in place.

    Whatever goes wrong, Ctrl-C included, no thread and no file of the reader stays.

    Args:
        source: from `open_source`, checked.
        model: says which checkpoint tensor goes where.
        destination: says where a parameter lives: `Backend.destination`.
        device: where the model runs.

    Raises:
        ModelLoadError: a file changed since its header was read, or the model's `load_weights` left weights out.
    """
    itemsizes = {name: each.itemsize for name, each in model.named_parameters(remove_duplicate=False)}
    sizes = {name: prod(place.shape) * itemsizes[place.parameter] for name, place in model.checkpoint_slices().items()}
    asked: set[str] = set()

    def asking(name: str) -> Tensor:
        asked.add(name)
        return destination(name)

    reader = source.reader(device)
    try:
        with _Bar(sum(sizes.values())) as bar:
            watched = _Watched(reader, bar)
            model.load_weights(watched, asking)
    finally:
        reader.close()
    _require_all(type(model).__name__, asked, [name for name in sizes if name not in watched.read])


class _Watched:
    """A checkpoint that notes what was read, for the progress bar and for the check at the end."""

    def __init__(self, checkpoint: Checkpoint, bar: tqdm) -> None:
        self._checkpoint = checkpoint
        self._bar = bar
        self.read: set[str] = set()

    def read_into(self, checkpoint_name: str, destination: Tensor) -> None:
        self._checkpoint.read_into(checkpoint_name, destination)
        self.read.add(checkpoint_name)
        self._bar.update(destination.nbytes)


class _Bar(tqdm):
    """Progress on stderr, absent where that is no terminal; without tqdm's monitor, which is a thread that stays."""

    monitor_interval = 0

    def __init__(self, total_bytes: int) -> None:
        look = {"desc": "loading weights", "unit": "B", "unit_scale": True, "leave": False}
        # A process without a stderr (a daemon's) has None there.
        is_seen = sys.stderr is not None and sys.stderr.isatty()
        super().__init__(total=total_bytes, disable=not is_seen, **look)


def _require_all(architecture: str, asked: set[str], left_out: list[str]) -> None:
    """A model whose loader does not ask would run with whatever is in its memory: say whose fault it is."""
    defect = f"a defect of {architecture}.load_weights, not of the checkpoint"
    if not asked:
        raise ModelLoadError(f"no destination was asked for any weight: {defect}")
    if left_out:
        raise ModelLoadError(f"{len(left_out)} tensors were not read, first {quoted(left_out, 1)}: {defect}")
