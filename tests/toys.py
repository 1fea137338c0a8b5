"""A small decoder of foreign modules, and the path from a plain copy of it to an offloaded one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.backend import Backend, make_backend, specs_of, weights_of
from offload.config import OffloadConfig
from offload.cpu import CpuDevice
from offload.device import Device, Stream
from offload.plan import Plan, plan

HIDDEN = 7


class Block(nn.Module):
    """Norm, two products, a scalar, and a parameter without elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, width)
        self.down = nn.Linear(width, HIDDEN, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.relu(self.up(self.norm(x))))


class Toy(nn.Module):
    """Embedding, blocks, and a head tied to the embedding."""

    def __init__(self, widths: Sequence[int], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, HIDDEN)
        self.layers = nn.ModuleList(Block(width) for width in widths)
        self.head = nn.Linear(HIDDEN, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.tensor([[1, 5, 3], [10, 0, 2]])


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(TOKENS)


class CountingDevice(CpuDevice):
    """A CPU that counts copies, and fails at the one it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0
        self.fail_at: int | None = None

    def copy(self, destination: Tensor, source: Tensor, stream: Stream = None) -> None:
        self.copies += 1
        if self.copies == self.fail_at:
            destination.fill_(0xFF)
            raise KeyboardInterrupt
        super().copy(destination, source, stream)


def prepared(model: nn.Module, config: Any, device: Device | None = None) -> tuple[Backend, Plan]:
    """A backend for `model` with its weights in their destinations; the model is left on `meta`, unattached."""
    weights, chosen = weights_of(model, model.layers), OffloadConfig.of(config)
    planned = plan(specs_of(weights), chosen)
    backend = make_backend(weights, planned, chosen, device or CountingDevice())
    for weight in weights:
        backend.destination(weight.name).copy_(model.get_parameter(weight.name).detach())
    backend.detach()
    return backend, planned


def offloaded(model: nn.Module, config: Any, device: Device | None = None) -> tuple[Backend, Plan]:
    """A backend for `model`, attached to it."""
    backend, planned = prepared(model, config, device)
    backend.attach(model, model.layers)
    return backend, planned


def uva(budget_bytes: float) -> dict[str, Any]:
    return {"uva": {"cpu_offload_gb": budget_bytes / 2**30}}


def prefetch(group: int = 1, count: int = 1, step: int = 1) -> dict[str, Any]:
    return {
        "prefetch": {"offload_group_size": group, "offload_num_in_group": count, "offload_prefetch_step": step},
    }
