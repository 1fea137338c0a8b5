"""A small model with fused, tied and one-dimensional weights, and folders of real safetensors files for it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from offload.models.base import Architecture, Slice

HIDDEN, ROWS, LAYERS = 6, 5, 3


class SmallModel(Architecture):
    """Per layer one matrix of two checkpoint tensors and one vector; a table that the head shares."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        blocks = []
        for _ in range(LAYERS):
            block = nn.Module()
            block.fused = nn.Linear(HIDDEN, 2 * ROWS, bias=False, dtype=dtype, device="meta")
            block.norm = nn.RMSNorm(HIDDEN, dtype=dtype, device="meta")
            blocks.append(block)
        self.blocks = nn.ModuleList(blocks)
        self.table = nn.Embedding(11, HIDDEN, dtype=dtype, device="meta")
        self.head = nn.Linear(HIDDEN, 11, bias=False, device="meta")
        self.head.weight = self.table.weight

    @property
    def layers(self) -> nn.ModuleList:
        return self.blocks

    def ignored(self, checkpoint_name: str) -> bool:
        return checkpoint_name == "lm_head.weight" or super().ignored(checkpoint_name)

    def checkpoint_slices(self) -> dict[str, Slice]:
        places = {"embed.weight": Slice("table.weight", (11, HIDDEN))}
        for index in range(LAYERS):
            fused = f"blocks.{index}.fused.weight"
            places[f"layers.{index}.up.weight"] = Slice(fused, (ROWS, HIDDEN), 0, ROWS)
            places[f"layers.{index}.gate.weight"] = Slice(fused, (ROWS, HIDDEN), ROWS, ROWS)
            places[f"layers.{index}.norm.weight"] = Slice(f"blocks.{index}.norm.weight", (HIDDEN,))
        return places


def checkpoint_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every tensor that `SmallModel` needs, random."""
    generator = torch.Generator().manual_seed(3)
    slices = SmallModel().checkpoint_slices()
    return {name: torch.randn(place.shape, generator=generator).to(dtype) for name, place in slices.items()}


def write_folder(folder: Path, *shards: dict[str, torch.Tensor], index: bool = False) -> Path:
    """Write each dict as one numbered shard (one alone as model.safetensors), with an index if asked for."""
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        label = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        save_file(tensors, folder / label)
        weight_map |= dict.fromkeys(tensors, label)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def split(tensors: dict[str, torch.Tensor], parts: int) -> list[dict[str, torch.Tensor]]:
    """Deal tensors into shards so that neighbours lie in different files."""
    names = list(tensors)
    return [{name: tensors[name] for name in names[part::parts]} for part in range(parts)]


def poisoned(model: Architecture, fill: float = float("nan")) -> dict[str, torch.Tensor]:
    """A destination for every parameter, shared ones once, full of NaN."""
    by_parameter: dict[int, torch.Tensor] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = by_parameter.setdefault(
            id(parameter), torch.full(parameter.shape, fill, dtype=parameter.dtype, device="cpu")
        )
    return found


def assert_loaded(destinations: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    """Every destination holds its checkpoint tensors, bit for bit after the conversion, and nothing else."""
    for name, place in SmallModel().checkpoint_slices().items():
        target = destinations[place.parameter]
        target = target if place.rows is None else target[place.start : place.start + place.rows]
        assert torch.equal(target, tensors[name].to(target.dtype)), name
    assert not any(target.isnan().any() for target in destinations.values())
