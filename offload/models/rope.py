"""Rotary position embedding: which frequencies a `config.json` asks for, and the rotation of queries and keys.

Frequencies are computed in float32 with torch's own operations, on the device where they are used, because that is
how the models were trained: at position 8000 one unit in the last place of a frequency already turns a head by 5e-4.
Angles are computed once per forward for the positions at hand; a table for the whole context would cost memory and
save 20 us.

Source: the four scalings are those of RoFormer (arXiv 2104.09864), position interpolation (2306.15595), Llama 3.1's
model card and YaRN (2309.00071); keys and defaults are transformers' `rope_parameters` (older: `rope_scaling`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.errors import ModelLoadError
from offload.text import shortened

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class Rope:
    """What a `config.json` says about rotary embedding.

    Attributes:
        kind: "default", "linear", "llama3" or "yarn".
        head_dim: rotated channels per head, all of them.
        theta: base of the geometric series of wavelengths.
        trained_context: positions before scaling; used by "llama3" and "yarn".
        options: the other keys of `rope_parameters`, by their names there.
    """

    kind: str
    head_dim: int
    theta: float
    trained_context: int
    options: Mapping[str, Any]

    def option(self, name: str) -> float:
        """One of them that must be a positive number."""
        value = self.options.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelLoadError(
                f"config.json: rope_parameters.{name} of rope type {shortened(self.kind)} is {shortened(value)}: "
                "give a positive number"
            )
        return value


def read_rope(config: Mapping[str, Any], head_dim: int, context: int) -> Rope:
    """Read `rope_parameters`, or the older `rope_scaling` beside `rope_theta`.

    Args:
        config: the text of a `config.json`, parsed.
        head_dim: channels of one head.
        context: the model's `max_position_embeddings`.

    Raises:
        ModelLoadError: the scaling is not known.
    """
    options = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(options, dict):
        raise ModelLoadError(f"config.json: rope_scaling is {shortened(options)}: it must be an object")
    kind = options.get("rope_type", options.get("type", "default"))
    if kind not in _KINDS:
        raise ModelLoadError(f"config.json: rope type {shortened(kind)} is not supported; known: {', '.join(_KINDS)}")
    partial = options.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelLoadError(f"config.json: partial_rotary_factor {shortened(partial)} is not supported; known: 1.0")
    theta = options.get("rope_theta", config.get("rope_theta"))
    theta = DEFAULT_THETA if theta is None else theta
    trained = config.get("original_max_position_embeddings") or options.get("original_max_position_embeddings")
    rope = Rope(kind, head_dim, theta, trained or context, {**options, "rope_theta": theta})
    for name in ("rope_theta", *_KINDS[kind].needed):
        rope.option(name)
    return rope


def inverse_frequencies(rope: Rope, device: torch.device) -> Tensor:
    """Return radians per position of each channel pair, (head_dim / 2) float32 on `device`."""
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32, device=device) / rope.head_dim
    return _KINDS[rope.kind].frequencies(rope, rope.theta**exponents)


def attention_factor(rope: Rope) -> float:
    """What cosines and sines are multiplied with: only yarn does (it sharpens attention over a longer context)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.options.get("attention_factor") is not None:
        return rope.option("attention_factor")
    factor = rope.option("factor")
    if rope.options.get("mscale") and rope.options.get("mscale_all_dim"):
        return _yarn_scale(factor, rope.option("mscale")) / _yarn_scale(factor, rope.option("mscale_all_dim"))
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _default(rope: Rope, wavelengths: Tensor) -> Tensor:
    return 1.0 / wavelengths


def _linear(rope: Rope, wavelengths: Tensor) -> Tensor:
    return 1.0 / wavelengths / rope.option("factor")


def _llama3(rope: Rope, wavelengths: Tensor) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones stay, those between are blended."""
    frequencies = 1.0 / wavelengths
    low, high = rope.option("low_freq_factor"), rope.option("high_freq_factor")
    turns = rope.trained_context / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / rope.option("factor") + kept * frequencies


def _yarn(rope: Rope, wavelengths: Tensor) -> Tensor:
    """Channels that turn often in the trained context stay, those that turn less than once are interpolated."""
    last = rope.head_dim - 1
    first_blended = _channel_with_turns(rope, rope.options.get("beta_fast") or 32)
    last_blended = _channel_with_turns(rope, rope.options.get("beta_slow") or 1)
    if rope.options.get("truncate", True):
        first_blended, last_blended = math.floor(first_blended), math.ceil(last_blended)
    first_blended, last_blended = max(first_blended, 0), min(last_blended, last)
    width = (last_blended - first_blended) or 0.001
    channels = torch.arange(rope.head_dim // 2, dtype=torch.float32, device=wavelengths.device)
    kept = 1 - ((channels - first_blended) / width).clamp(0, 1)
    return 1.0 / (rope.option("factor") * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _channel_with_turns(rope: Rope, turns: float) -> float:
    """The channel pair, as a real number, that turns this often within the trained context."""
    return rope.head_dim * math.log(rope.trained_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


class _Kind(NamedTuple):
    """One scaling: its formula, and the options that it cannot do without."""

    frequencies: Callable[[Rope, Tensor], Tensor]
    needed: tuple[str, ...] = ()


_KINDS = {
    "default": _Kind(_default),
    "linear": _Kind(_linear, ("factor",)),
    "llama3": _Kind(_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": _Kind(_yarn, ("factor",)),
}


@dataclass(frozen=True)
class Rotation:
    """Cosines and signed sines of the positions of one forward, each (B, T, 1, head_dim).

    Attributes:
        cosines: the angle's cosine, for both halves of a head.
        sines: minus the sine for the first half, plus the sine for the second.
    """

    cosines: Tensor
    sines: Tensor

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate heads (B, T, N, head_dim); channel i turns with channel i + head_dim / 2."""
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        return (heads * self.cosines).addcmul_(swapped, self.sines)


class Rotary:
    """Makes the `Rotation` of a forward; holds the frequencies, which are not weights and stay on the device."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._factor = attention_factor(rope)
        self._frequencies: Tensor | None = None

    def prepare(self, device: torch.device) -> None:
        """Compute the frequencies on `device`."""
        self._frequencies = inverse_frequencies(self._rope, device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions (B, T) int64 -> their rotation, computed in float32 and rounded to `dtype`."""
        assert self._frequencies is not None, "prepare() comes before the first forward"
        angles = positions[:, :, None, None] * self._frequencies
        cosines, sines = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cosines, sines = cosines * self._factor, sines * self._factor
        return Rotation(torch.cat((cosines, cosines), -1).to(dtype), torch.cat((-sines, sines), -1).to(dtype))
