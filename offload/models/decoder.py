"""One decoder for every dense architecture: pre-norm, grouped-query attention, rotary positions, gated MLP.

The modules carry vLLM's fused names (`qkv_proj`, `gate_up_proj`) in vLLM's order of declaration, because that order is
how a budget is spent. Each module that fuses checkpoint tensors says where they go (`checkpoint_slices`). A model knows
nothing of devices, streams or offloading: every weight is read through its parameter at each use, and that is all the
backends need.

What a decode step costs besides its matrix-vector products is operators: 16 per layer, views not counted. So queries
and keys are rotated together, gate and up are one product, and decode attention needs neither mask nor copied keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from offload.linear import Linear
from offload.models.base import Architecture, CacheShape, Slice
from offload.models.config import DecoderConfig, Family, read_config
from offload.models.rope import Rotary, Rotation

if TYPE_CHECKING:
    from offload.kv_cache import KVCache


def stacked(module: str, linear: nn.Linear, parts: Mapping[str, tuple[str, int]]) -> dict[str, Slice]:
    """Places of checkpoint linears that are stacked by rows in one.

    Args:
        module: full name of the module that holds them, "model.layers.0.mlp".
        linear: the fused linear.
        parts: checkpoint name -> (fused name, rows), in the order of their rows.
    """
    places, start = {}, 0
    for part, (fused, rows) in parts.items():
        shapes = {"weight": (rows, linear.in_features), "bias": (rows,)}
        for leaf, _ in linear.named_parameters():
            places[f"{module}.{part}.{leaf}"] = Slice(f"{module}.{fused}.{leaf}", shapes[leaf], start, rows)
        start += rows
    return places


class Attention(nn.Module):
    """Causal attention with grouped key-value heads."""

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.window = config.windows[index]
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden, rows, config.qkv_bias, dtype=dtype)
        self.o_proj = Linear(config.heads * config.head_dim, config.hidden, config.o_bias, dtype=dtype)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps, dtype=dtype)
            self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps, dtype=dtype)
        self.qk_norm = config.qk_norm

    def checkpoint_slices(self, module: str) -> dict[str, Slice]:
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
        return stacked(module, self.qkv_proj, {part: ("qkv_proj", rows) for part, rows in sizes.items()})

    def forward(self, hidden: Tensor, rotation: Rotation, cache: KVCache) -> Tensor:
        """hidden (B, T, H) -> (B, T, H)."""
        batch, length, _ = hidden.shape
        heads = self.qkv_proj(hidden).view(batch, length, -1, self.head_dim)
        if self.qk_norm:
            query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), 2)
            query, key = rotation(self.q_norm(query)), rotation(self.k_norm(key))
        else:
            rotated, value = heads.split((self.heads + self.kv_heads, self.kv_heads), 2)
            query, key = rotation(rotated).split((self.heads, self.kv_heads), 2)
        attended = cache.attend(self.index, query, key, value, self.window)
        return self.o_proj(attended)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, intermediate: int | None = None) -> None:
        super().__init__()
        self.intermediate = intermediate or config.intermediate
        self.gate_up_proj = Linear(config.hidden, 2 * self.intermediate, config.mlp_bias, dtype=dtype)
        self.down_proj = Linear(self.intermediate, config.hidden, config.mlp_bias, dtype=dtype)

    def checkpoint_slices(self, module: str) -> dict[str, Slice]:
        rows = ("gate_up_proj", self.intermediate)
        return stacked(module, self.gate_up_proj, {"gate_proj": rows, "up_proj": rows})

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (B, T, H) -> (B, T, H)."""
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)
        return self.down_proj(silu(gate) * up)


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised hidden states and added to them."""

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, config.norm_eps, dtype=dtype)
        self.self_attn = Attention(config, index, dtype)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, config.norm_eps, dtype=dtype)
        self.mlp = mlp

    def forward(self, hidden: Tensor, rotation: Rotation, cache: KVCache) -> Tensor:
        """hidden (B, T, H) -> (B, T, H)."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(Architecture):
    """A causal language model; subclasses give a `family`, and may build another MLP for some layers."""

    supports_weight_offload = True
    family: ClassVar[Family]

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, raw: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()
        table = torch.empty(config.vocabulary, config.hidden, dtype=dtype)
        self.model.embed_tokens = nn.Embedding(config.vocabulary, config.hidden, _weight=table)
        self.model.layers = nn.ModuleList(
            DecoderLayer(config, index, dtype, self.build_mlp(config, index, dtype, raw))
            for index in range(config.layers)
        )
        self.model.norm = nn.RMSNorm(config.hidden, config.norm_eps, dtype=dtype)
        self.lm_head = Linear(config.hidden, config.vocabulary, False, dtype=dtype)
        if config.tied_head:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.requires_grad_(False)
        self.rotary = Rotary(config.rope)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype) -> Decoder:
        return cls(read_config(config, cls.family), dtype, config)

    def build_mlp(self, config: DecoderConfig, index: int, dtype: torch.dtype, raw: Mapping[str, Any]) -> nn.Module:
        """Make the MLP of layer `index`; `raw` is the whole `config.json`, for keys that `DecoderConfig` has not."""
        return GatedMLP(config, dtype)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def context(self) -> int:
        return self.config.context

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.config.layers, self.config.kv_heads, self.config.head_dim)

    def checkpoint_slices(self) -> dict[str, Slice]:
        fused: dict[str, Slice] = {}
        for name, module in self.named_modules():
            if name and hasattr(module, "checkpoint_slices"):
                fused.update(module.checkpoint_slices(name))
        taken = {place.parameter for place in fused.values()}
        whole = {name: Slice(name, tuple(p.shape)) for name, p in self.named_parameters() if name not in taken}
        return whole | fused

    def ignored(self, checkpoint_name: str) -> bool:
        tied = self.config.tied_head and checkpoint_name == "lm_head.weight"
        return tied or super().ignored(checkpoint_name)

    def prepare(self, device: torch.device) -> None:
        self.rotary.prepare(device)

    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        hidden = self.model.embed_tokens(tokens)
        rotation = self.rotary(positions, hidden.dtype)
        for layer in self.model.layers:
            hidden = layer(hidden, rotation, cache)
        return self.model.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)
