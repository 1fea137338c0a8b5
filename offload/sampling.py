"""From logits to the next token, on the device: the largest logit, or a draw at a temperature."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from offload.device import Device
from offload.text import shortened

LEAST_TEMPERATURE = 1e-20
"""Below it logits over the temperature are no finite float32 any more, and their softmax is no number."""


class Sampler:
    """Chooses one token per sequence and step.

    Args:
        device: where the logits are.
        temperature: 0 takes the largest logit; otherwise logits are divided by it before the draw.
        seed: makes the draws repeatable. Every sequence of a batch then gets the same random numbers, so that each is
            drawn as if it were alone; without a seed each gets its own.

    Raises:
        ValueError: the temperature or the seed is not usable.
    """

    def __init__(self, device: Device, temperature: float = 0.0, seed: int | None = None) -> None:
        _require_temperature(temperature)
        _require_seed(seed)
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


def _require_temperature(temperature: float) -> None:
    is_number = isinstance(temperature, Real) and math.isfinite(temperature)
    if not is_number or not (temperature == 0 or temperature >= LEAST_TEMPERATURE):
        raise ValueError(
            f"temperature is {shortened(temperature)}: give 0 for the likeliest token, or a positive number of at "
            f"least {LEAST_TEMPERATURE:g}"
        )


def _require_seed(seed: int | None) -> None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64):
        raise ValueError(f"seed is {shortened(seed)}: give an integer from 0 to 2^64 - 1")
