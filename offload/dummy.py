"""Weights without files: seeded random numbers, or nothing at all.

Speed does not depend on values, so that any `config.json` can be measured without its weights. One small random block
is repeated through each tensor; that costs what writing memory costs. Its length is a prime, so that no two of a
million rows are equal, which would make logits tie. A weight depends on the seed and its name alone: not on where it
lives, nor on what else is loaded.
"""

from __future__ import annotations

import zlib
from math import sqrt

import torch
from torch import Tensor

from offload.device import Device
from offload.host import map_anonymous
from offload.models.base import Architecture

BLOCK_ELEMENTS = 1_048_573  # the largest prime below 2^20
VECTOR_SPREAD = 0.02
"""Standard deviation of biases, and of the scales of norms around 1."""


class DummyWeights:
    """Random weights of a sensible size: matrices keep the variance of what they multiply, norms scale by about 1.

    Args:
        seed: of the random numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def check(self, model: Architecture) -> None:
        """Accept every model."""

    def reader(self, device: Device) -> DummyReader:
        """Return what fills destinations on `device`."""
        return DummyReader(self._seed, device)


class DummyReader:
    """Fills destinations with one repeated block."""

    def __init__(self, seed: int, device: Device) -> None:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        self._noise = torch.randn(BLOCK_ELEMENTS, generator=generator, device="cpu")
        self._device = device
        self._blocks: dict[tuple[float, float, torch.dtype, bool], Tensor] = {}

    def read_into(self, checkpoint_name: str, destination: Tensor) -> None:
        """Fill `destination` with the random weights of this name."""
        if destination.is_meta or not destination.numel():
            return
        flat = destination.detach().view(-1)
        block = self._block(*_spread(checkpoint_name, destination.shape), flat)
        turn = zlib.crc32(checkpoint_name.encode()) % BLOCK_ELEMENTS
        with self._device.active():
            self._put(flat[: BLOCK_ELEMENTS - turn], block[turn:])
            self._put(flat[BLOCK_ELEMENTS - turn : BLOCK_ELEMENTS], block[:turn])
            done = BLOCK_ELEMENTS
            while done < flat.numel():
                self._put(flat[done : 2 * done], flat[:done])
                done *= 2

    def close(self) -> None:
        """Wait for the copies, then let go of the blocks. Idempotent."""
        if self._blocks:
            self._device.synchronise()
            self._blocks.clear()

    def _put(self, destination: Tensor, source: Tensor) -> None:
        if destination.numel():
            self._device.copy(destination, source[: destination.numel()])

    def _block(self, deviation: float, mean: float, flat: Tensor) -> Tensor:
        """The noise at this scale in the destination's dtype, in memory from which the device can copy."""
        on_host = flat.device.type == "cpu"
        key = (deviation, mean, flat.dtype, on_host)
        if key not in self._blocks:
            nbytes = BLOCK_ELEMENTS * flat.itemsize
            memory = map_anonymous(nbytes) if on_host else self._device.allocate_host(nbytes)
            self._blocks[key] = memory.view(flat.dtype).copy_(self._noise * deviation + mean)
        return self._blocks[key]


class NoWeights:
    """Fills nothing: for a device whose tensors have no bytes."""

    def check(self, model: Architecture) -> None:
        """Accept every model."""

    def reader(self, device: Device) -> NoWeights:
        """Return itself."""
        return self

    def read_into(self, checkpoint_name: str, destination: Tensor) -> None:
        """Leave `destination` as it is."""

    def close(self) -> None:
        """Nothing is held."""


def _spread(name: str, shape: torch.Size) -> tuple[float, float]:
    """Standard deviation and mean of a weight, by its name and shape."""
    if len(shape) >= 2:
        return 1 / sqrt(shape[-1]), 0.0
    return VECTOR_SPREAD, 0.0 if name.endswith("bias") else 1.0
