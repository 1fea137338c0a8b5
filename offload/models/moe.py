"""Mixture-of-experts architectures: the dense decoder with a router and stacked experts in place of some MLPs.

Most bytes of such a model are experts and a token uses few of them, so the experts of a layer are two stacked
parameters (`experts.w13_weight`, `experts.w2_weight`) that one operator reads by expert: host experts that are idle
never cross the bus. The same operator runs when they are on the device, so both give the same bits.

Checkpoints come in several layouts (an expert a tensor, or all of a layer in one). Which one a file has is told by its
names, by `choose_layout`, before anything asks where tensors go.

Source: router options and defaults are those of transformers' configuration classes; fused names are vLLM's, with
`mlp` for every family (vLLM calls Mixtral's block `block_sparse_moe`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from offload.errors import ModelLoadError
from offload.linear import Linear
from offload.models.base import Slice
from offload.models.config import (
    DecoderConfig,
    Family,
    Reader,
    Windows,
    no_window,
    same_window,
    window_by_layer,
)
from offload.models.decoder import Decoder, GatedMLP
from offload.text import shortened
from offload_kernels import fused_experts


@dataclass(frozen=True)
class Routing:
    """The experts of one architecture.

    Attributes:
        experts: experts per layer, E.
        per_token: experts that each token uses, k.
        intermediate: channels inside an expert, I.
        normalised: whether the k weights are divided by their sum.
        weights_in_float: whether the k weights stay float32 (else they have the model's dtype).
        shared: channels inside the expert that every token uses; 0 if there is none.
        sparse_step: every so many layers, from this layer on, have experts.
        dense_layers: layers that have none all the same.
    """

    experts: int
    per_token: int
    intermediate: int
    normalised: bool
    weights_in_float: bool = False
    shared: int = 0
    sparse_step: int = 1
    dense_layers: frozenset[int] = frozenset()

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of this index has experts."""
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


@dataclass(frozen=True)
class Layout:
    """Names that one kind of checkpoint gives a sparse block; `{e}` stands for the expert.

    Attributes:
        block: what the block is called in its layer.
        gate, up, down: an expert's three tensors; `up` is empty where the stacked `gate` holds both.
    """

    block: str
    gate: str
    up: str
    down: str

    def is_in(self, names: Container[str], layer: str) -> bool:
        """Whether a checkpoint with these names has this layout in `layer`."""
        return f"{layer}.{self.block}.{self.gate.format(e=0)}" in names


STACKED = Layout("mlp", "experts.gate_up_proj", "", "experts.down_proj")
LAYOUTS = (
    STACKED,
    Layout("mlp", "experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight", "experts.{e}.down_proj.weight"),
    Layout("block_sparse_moe", "experts.{e}.w1.weight", "experts.{e}.w3.weight", "experts.{e}.w2.weight"),
    Layout("block_sparse_moe", "experts.gate_up_proj", "", "experts.down_proj"),
)


class Experts(nn.Module):
    """The stacked experts of one layer: w13 (E, 2 I, H), gate rows before up rows, and w2 (E, H, I)."""

    def __init__(self, routing: Routing, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        experts, intermediate = routing.experts, routing.intermediate
        self.w13_weight = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden, dtype=dtype))
        self.w2_weight = nn.Parameter(torch.empty(experts, hidden, intermediate, dtype=dtype))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x (T, H), ids and weights (T, k) -> (T, H)."""
        return fused_experts(x, self.w13_weight, self.w2_weight, ids, weights)


class SparseMLP(nn.Module):
    """A router that gives each token k experts, and the expert that all tokens share, where there is one."""

    def __init__(self, config: DecoderConfig, routing: Routing, dtype: torch.dtype) -> None:
        super().__init__()
        self.routing = routing
        self.layout = STACKED
        self.gate = Linear(config.hidden, routing.experts, bias=False, dtype=dtype)
        self.experts = Experts(routing, config.hidden, dtype)
        if routing.shared:
            self.shared_expert = GatedMLP(config, dtype, routing.shared)
            self.shared_expert_gate = Linear(config.hidden, 1, bias=False, dtype=dtype)

    def choose_layout(self, module: str, names: Container[str]) -> None:
        """Take the layout that these names of a checkpoint have; the stacked one if they have none."""
        layer = module.rpartition(".")[0]
        self.layout = next((layout for layout in LAYOUTS if layout.is_in(names, layer)), STACKED)

    def checkpoint_slices(self, module: str) -> dict[str, Slice]:
        block = f"{module.rpartition('.')[0]}.{self.layout.block}"
        places = {f"{block}.gate.weight": Slice(f"{module}.gate.weight", tuple(self.gate.weight.shape))}
        w13, w2 = f"{module}.experts.w13_weight", f"{module}.experts.w2_weight"
        if not self.layout.up:
            places[f"{block}.{self.layout.gate}"] = Slice(w13, tuple(self.experts.w13_weight.shape))
            places[f"{block}.{self.layout.down}"] = Slice(w2, tuple(self.experts.w2_weight.shape))
            return places
        _, hidden, rows = self.experts.w2_weight.shape
        for expert in range(self.routing.experts):
            gate, up, down = (
                f"{block}.{name.format(e=expert)}" for name in (self.layout.gate, self.layout.up, self.layout.down)
            )
            places[gate] = Slice(w13, (rows, hidden), 0, rows, expert)
            places[up] = Slice(w13, (rows, hidden), rows, rows, expert)
            places[down] = Slice(w2, (hidden, rows), index=expert)
        return places

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, H) -> ids (T, k) int64 and weights (T, k) of each token's experts."""
        shares = torch.softmax(self.gate(x), -1, dtype=torch.float32)
        weights, ids = torch.topk(shares, self.routing.per_token, -1)
        if self.routing.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights if self.routing.weights_in_float else weights.to(x.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (B, T, H) -> (B, T, H)."""
        x = hidden.flatten(0, 1)
        out = self.experts(x, *self.route(x))
        if self.routing.shared:
            out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out.view(hidden.shape)


class SparseDecoder(Decoder):
    """A decoder whose layers may have experts; subclasses read their router options."""

    expert_defaults: ClassVar[Mapping[str, Any]]

    def build_mlp(self, config: DecoderConfig, index: int, dtype: torch.dtype, raw: Mapping[str, Any]) -> nn.Module:
        routing = self.read_routing(Reader(raw, self.expert_defaults), config)
        if not 0 < routing.per_token <= routing.experts:
            raise ModelLoadError(
                f"config.json: num_experts_per_tok is {routing.per_token}, of {routing.experts} experts: it must be "
                "between 1 and their number"
            )
        return SparseMLP(config, routing, dtype) if routing.has_experts(index) else GatedMLP(config, dtype)

    def read_routing(self, reader: Reader, config: DecoderConfig) -> Routing:
        """Read what the `config.json` says about experts."""
        raise TypeError(f"{type(self).__name__} does not say how it reads its router options")

    def choose_layout(self, names: Container[str]) -> None:
        for name, module in self.named_modules():
            if isinstance(module, SparseMLP):
                module.choose_layout(name, names)


def _qwen_routing(reader: Reader, shared: int) -> Routing:
    dense = reader.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ModelLoadError(f"config.json: mlp_only_layers is {shortened(dense)}: it must be a list of layer indices")
    return Routing(
        # transformers writes this key for some families under the name that Mixtral has for it.
        experts=reader.count("num_local_experts" if "num_local_experts" in reader.config else "num_experts"),
        per_token=reader.count("num_experts_per_tok"),
        intermediate=reader.count("moe_intermediate_size"),
        normalised=reader.flag("norm_topk_prob"),
        shared=shared,
        sparse_step=reader.count("decoder_sparse_step"),
        dense_layers=frozenset(dense),
    )


class Qwen3MoeForCausalLM(SparseDecoder):
    """Qwen 3 with experts: 30B-A3B, 235B-A22B."""

    family = Family(
        # Here one window is for every layer or for none; max_window_layers is not looked at.
        lambda reader: same_window(reader) if reader.flag("use_sliding_window") else no_window(reader),
        {
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
        },
        qk_norm=True,
    )
    expert_defaults = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    }

    def read_routing(self, reader: Reader, config: DecoderConfig) -> Routing:
        return _qwen_routing(reader, shared=0)


def _alternating_window(reader: Reader) -> Windows:
    """`layer_types` says which layers slide; without it, every other one below `max_window_layers`."""
    if reader.config.get("layer_types") is not None or not reader.flag("use_sliding_window"):
        return window_by_layer(reader)
    window, last = reader.window("sliding_window"), reader.count("max_window_layers")
    layers = range(reader.count("num_hidden_layers"))
    return tuple(window if layer % 2 == 0 and layer < last else None for layer in layers)


class Qwen2MoeForCausalLM(SparseDecoder):
    """Qwen 1.5 and 2 with experts: one more expert is shared by all tokens, behind a gate of its own."""

    family = Family(
        _alternating_window,
        {
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "intermediate_size": 5632,
        },
        o_bias=False,
    )
    expert_defaults = {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype) -> Decoder:
        return super().from_config({**config, "attention_bias": config.get("qkv_bias", True)}, dtype)

    def read_routing(self, reader: Reader, config: DecoderConfig) -> Routing:
        return _qwen_routing(reader, shared=reader.count("shared_expert_intermediate_size"))


class MixtralForCausalLM(SparseDecoder):
    """Mixtral 8x7B and 8x22B: few large experts, weights always normalised and kept in float32."""

    family = Family(
        same_window,
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": None, "rms_norm_eps": 1e-5},
        qkv_bias=False,
        o_bias=False,
    )
    expert_defaults = {"num_local_experts": 8, "num_experts_per_tok": 2}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype) -> Decoder:
        return super().from_config({"rope_theta": 1e6, **config}, dtype)

    def read_routing(self, reader: Reader, config: DecoderConfig) -> Routing:
        return Routing(
            experts=reader.count("num_local_experts"),
            per_token=reader.count("num_experts_per_tok"),
            intermediate=config.intermediate,
            normalised=True,
            weights_in_float=True,
        )
