"""What a decoder needs to know, read from the text of a `config.json`; what the file leaves unsaid is per family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.errors import ModelLoadError
from offload.models.rope import Rope, read_rope
from offload.text import shortened

Windows = tuple[int | None, ...]

LARGEST = 2**31
"""No size of a model reaches it, and the products of smaller ones are numbers that torch can count with."""


@dataclass(frozen=True)
class DecoderConfig:
    """One decoder: sizes in elements, `windows[i]` the sliding window of layer i in positions (None: all of them)."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: Windows
    rope: Rope


class Reader:
    """Typed access to a `config.json`: the default where a key is absent or null, a refusal where it is wrong."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.config = config
        self.defaults = defaults

    def count(self, key: str, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < LARGEST:
            wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise ModelLoadError(f"config.json: {key} is {shortened(value)}: it must be {wanted} below 2^31")
        return value

    def number(self, key: str) -> float:
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelLoadError(f"config.json: {key} is {shortened(value)}: it must be a number")
        return value

    def flag(self, key: str) -> bool:
        value = self._value(key)
        if not isinstance(value, bool):
            raise ModelLoadError(f"config.json: {key} is {shortened(value)}: it must be true or false")
        return value

    def window(self, key: str) -> int | None:
        """A sliding window; here null is a value, and means that there is none."""
        value = self.config.get(key, self.defaults.get(key))
        return None if value is None else self.count(key)

    def _value(self, key: str) -> Any:
        value = self.config.get(key)
        if value is None:
            value = self.defaults.get(key)
        if value is None:
            raise ModelLoadError(f"config.json has no {key}: it is not the config of a supported model")
        return value


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the others.

    Attributes:
        windows: sliding windows of the layers.
        defaults: values of keys that a `config.json` may leave out, as transformers has them.
        qkv_bias, o_bias: whether the attention's linears have a bias; None asks the key `attention_bias`.
        qk_norm: whether queries and keys are normalised per head.
    """

    windows: Callable[[Reader], Windows]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False


_COMMON_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def read_config(config: Mapping[str, Any], family: Family) -> DecoderConfig:
    """Read a `config.json`.

    Raises:
        ModelLoadError: a size is missing or wrong, or the model does something that this decoder does not.
    """
    reader = Reader(config, {**_COMMON_DEFAULTS, **family.defaults})
    if config.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"config.json: hidden_act {shortened(config['hidden_act'])} is not supported; known: silu")
    heads, hidden = reader.count("num_attention_heads"), reader.count("hidden_size")
    reader.defaults = {"num_key_value_heads": heads, "head_dim": hidden // heads, **reader.defaults}
    kv_heads, head_dim, context = (
        reader.count(key) for key in ("num_key_value_heads", "head_dim", "max_position_embeddings")
    )
    if heads % kv_heads or head_dim % 2:
        raise ModelLoadError(
            f"config.json: {heads} attention heads of {head_dim} channels and {kv_heads} key-value heads do not fit "
            "together: the number of heads must be a multiple of key-value heads and channels must be even"
        )
    attention_bias = reader.flag("attention_bias")
    return DecoderConfig(
        vocabulary=reader.count("vocab_size"),
        hidden=hidden,
        intermediate=reader.count("intermediate_size"),
        layers=reader.count("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps"),
        context=context,
        tied_head=reader.flag("tie_word_embeddings"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=reader.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        windows=family.windows(reader),
        rope=read_rope(config, head_dim, context),
    )


def no_window(reader: Reader) -> Windows:
    """Every layer attends to everything before it."""
    return (None,) * reader.count("num_hidden_layers")


def same_window(reader: Reader) -> Windows:
    """Every layer has the window that `sliding_window` gives."""
    return (reader.window("sliding_window"),) * reader.count("num_hidden_layers")


def window_by_layer(reader: Reader) -> Windows:
    """`layer_types` says which layers slide; without it, those from `max_window_layers` on if `use_sliding_window`."""
    layers = reader.count("num_hidden_layers")
    window = reader.window("sliding_window") if reader.flag("use_sliding_window") else None
    kinds = reader.config.get("layer_types")
    if kinds is None:
        first = reader.count("max_window_layers", least=0)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ModelLoadError(
            f"config.json: layer_types {shortened(kinds)} must have {layers} entries, each "
            "'full_attention' or 'sliding_attention'"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
