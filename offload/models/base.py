"""What every architecture promises: built on `meta` from a `config.json`, named as vLLM names it, loaded by asking.

The loader and the backends see only this: `layers`, the parameters' names, `checkpoint_slices` (where each checkpoint
tensor goes inside a fused parameter) and `load_weights`, which asks for the destination of every weight it fills.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from offload.kv_cache import KVCache


@dataclass(frozen=True)
class Slice:
    """Where one checkpoint tensor goes: `parameter[index][start : start + rows]`, the whole of it if `rows` is None.

    Attributes:
        parameter: full name of the destination, "model.layers.0.self_attn.qkv_proj.weight".
        shape: the shape that the checkpoint tensor must have.
        start, rows: rows of the destination (of `parameter[index]` where index is given).
        index: leading index (an expert) or None.
    """

    parameter: str
    shape: tuple[int, ...]
    start: int = 0
    rows: int | None = None
    index: int | None = None


@dataclass(frozen=True)
class CacheShape:
    """What one token of one sequence leaves in the key-value cache: keys and values of every layer.

    Attributes:
        layers: number of layers that attend.
        heads: key-value heads of a layer.
        head_dim: channels of a head.
    """

    layers: int
    heads: int
    head_dim: int


class Checkpoint(Protocol):
    """A folder's tensors, opened but not read (`offload.loader`)."""

    def read_into(self, checkpoint_name: str, destination: Tensor) -> None:
        """Copy one tensor, dtype converted on the way, into `destination` (host or device memory)."""


class Architecture(nn.Module):
    """A causal language model whose weights may be offloaded.

    Subclasses set `supports_weight_offload = True` only when every weight is read through its parameter at each use.
    """

    supports_weight_offload: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype) -> Architecture:
        """Build on the current default device (the engine uses `meta`) from the text of a `config.json`."""
        raise TypeError(f"{cls.__name__} does not say how it is built from a config.json")

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order; their parameters are what can be offloaded."""
        raise TypeError(f"{type(self).__name__} has no decoder layers")

    @property
    def context(self) -> int:
        """How many positions the model was made for."""
        raise TypeError(f"{type(self).__name__} does not say how long its context is")

    @property
    def cache_shape(self) -> CacheShape:
        """What the engine must keep per token."""
        raise TypeError(f"{type(self).__name__} does not say what it caches")

    def choose_layout(self, names: Container[str]) -> None:
        """Be told a checkpoint's names, before `checkpoint_slices`; for architectures that know several layouts."""

    def checkpoint_slices(self) -> dict[str, Slice]:
        """Map every checkpoint tensor's name to its place. What is not in here is unexpected in a file."""
        raise TypeError(f"{type(self).__name__} does not map checkpoint names")

    def ignored(self, checkpoint_name: str) -> bool:
        """True for tensors that a file may hold and the model does not need (`rotary_emb.inv_freq`, a tied head)."""
        return checkpoint_name.endswith("rotary_emb.inv_freq")

    def load_weights(self, checkpoint: Checkpoint, destination: Callable[[str], Tensor]) -> None:
        """Fill every weight: ask `destination` for each parameter, once, and read each checkpoint tensor into it."""
        for name, place in self.checkpoint_slices().items():
            target = destination(place.parameter)
            if place.index is not None:
                target = target[place.index]
            if place.rows is not None:
                target = target[place.start : place.start + place.rows]
            checkpoint.read_into(name, target)

    def prepare(self, device: torch.device) -> None:
        """Compute what is no weight but needs memory (rotary frequencies) on `device`; called once, after loading."""

    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """tokens, positions (B, T) int64 -> hidden states (B, T, H); `logits` turns chosen rows into logits."""
        raise TypeError(f"{type(self).__name__} has no forward")

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (B, H) -> logits (B, vocabulary)."""
        raise TypeError(f"{type(self).__name__} has no output head")
