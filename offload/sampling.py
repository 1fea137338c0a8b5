"""From logits to the next token, on the device: the largest logit, or a draw at a temperature."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offload.device import Device


class Sampler:
    """Chooses one token per sequence and step.

    Args:
        device: where the logits are.
        temperature: 0 takes the largest logit; otherwise logits are divided by it before the draw.
        seed: makes the draws repeatable. Every sequence of a batch then gets the same random numbers, so that each is
            drawn as if it were alone; without a seed each gets its own.

    Raises:
        ValueError: the temperature is negative or not finite.
    """

    def __init__(self, device: Device, temperature: float = 0.0, seed: int | None = None) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"temperature is {temperature}: give 0 for the likeliest token, or a positive number")
        self._temperature = temperature
        self._shared = seed is not None
        self._generator = None
        if seed is not None and device.torch_device.type != "meta":  # on meta there are no numbers to repeat
            self._generator = torch.Generator(device.torch_device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """logits (B, V) -> tokens (B, 1) int64."""
        if self._temperature == 0:
            return logits.argmax(-1, keepdim=True)
        probabilities = torch.softmax(logits.float() / self._temperature, -1)
        # The first of independent exponential clocks with these rates is a draw from them (the Gumbel-max trick).
        rows = probabilities[:1] if self._shared else probabilities
        clocks = torch.empty_like(rows).exponential_(generator=self._generator)
        return (probabilities / clocks).argmax(-1, keepdim=True)
