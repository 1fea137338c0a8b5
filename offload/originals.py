"""The parameters and buffers of a foreign module as they were, while their bytes are elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Original:
    """A parameter or buffer as it was.

    Attributes:
        tensor: the module's own object; emptied while its weight is on the host.
        names: every name that it has in the module.
        device, size, stride: of the tensor.
        requires_grad: its flag.
        in_inference: it was made in inference mode, and stays a tensor of that kind.
    """

    tensor: Tensor
    names: list[str]
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool
    in_inference: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Original:
        size, stride = tensor.size(), tensor.stride()
        return cls(tensor, [], tensor.device, size, stride, tensor.requires_grad, tensor.is_inference())

    @property
    def nbytes(self) -> int:
        return self.size.numel() * self.tensor.element_size()

    def copy_of(self, source: Tensor) -> Tensor:
        """These bytes in memory of their own, where it was and as it was laid out."""
        with torch.inference_mode(self.in_inference):
            return torch.empty_strided(self.size, self.stride, dtype=source.dtype, device=self.device).copy_(source)

    def move_to(self, place: torch.device) -> None:
        """Put its bytes elsewhere; the object, and whoever holds it, stays."""
        if self.tensor.device != place:
            with torch.inference_mode(self.in_inference):
                self.tensor.data = self.tensor.data.to(place)

    def hold(self, data: Tensor) -> None:
        """Give it other bytes; the object, and whoever holds it, stays."""
        with torch.inference_mode(self.in_inference):
            self.tensor.data = data

    def freeze(self, frozen: bool = True) -> None:
        """Stop autograd from recording it, or give it its own flag back."""
        with torch.inference_mode(self.in_inference):
            self.tensor.requires_grad_(self.requires_grad and not frozen)

    def empty(self) -> None:
        """Let go of its bytes."""
        with torch.inference_mode(self.in_inference):
            self.tensor.data = self.tensor.data.new_empty(0)


def originals_of(module: nn.Module, chosen: set[str]) -> tuple[list[Original], list[Original]]:
    """The parameters that go to the host, and the parameters and buffers that stay, each once with all its names."""
    host: dict[int, Original] = {}
    resident: dict[int, Original] = {}
    for name, tensor in _named_tensors(module):
        kind = host if name in chosen else resident
        kind.setdefault(id(tensor), Original.of(tensor)).names.append(name)
    return list(host.values()), list(resident.values())


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
