"""The architectures, found by the first name in a `config.json`'s `architectures`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.backend import specs_of, weights_of
from offload.errors import ModelLoadError
from offload.models.base import Architecture, CacheShape, Checkpoint, Slice
from offload.models.dense import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from offload.models.moe import MixtralForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM
from offload.plan import ParameterSpec
from offload.text import shortened

__all__ = [
    "Architecture",
    "CacheShape",
    "Checkpoint",
    "Slice",
    "architecture",
    "build",
    "model_dtype",
    "parameter_specs",
    "register",
]

_REGISTRY: dict[str, type[Architecture]] = {}

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def register(cls: type[Architecture]) -> type[Architecture]:
    """Make an architecture known under its class name, as it stands in `architectures`."""
    _REGISTRY[cls.__name__] = cls
    return cls


for _known in (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    MixtralForCausalLM,
    Qwen2MoeForCausalLM,
):
    register(_known)


def architecture(config: Mapping[str, Any]) -> type[Architecture]:
    """Return the class that runs a model.

    Args:
        config: the text of its `config.json`, parsed.

    Raises:
        ModelLoadError: the architecture is not known, or the checkpoint is quantised.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ModelLoadError(
            f"config.json: architecture {shortened(name)} is not known; known: {', '.join(sorted(_REGISTRY))}"
        )
    quantised = config.get("quantization_config") or config.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "unknown method") if isinstance(quantised, dict) else quantised
        raise ModelLoadError(
            f"config.json: the checkpoint is quantised ({shortened(method)}), which is not supported yet: "
            "use the unquantised checkpoint"
        )
    return _REGISTRY[name]


def model_dtype(config: Mapping[str, Any], dtype: torch.dtype | str | None = None) -> torch.dtype:
    """Return the dtype of the weights: the one asked for, else the one in `config.json`, else float32 as it implies.

    Raises:
        ModelLoadError: it is none of bfloat16, float16, float32.
    """
    wanted = dtype or config.get("dtype") or config.get("torch_dtype") or torch.float32
    if isinstance(wanted, str):
        wanted = DTYPES.get(wanted.removeprefix("torch."), wanted)
    if wanted not in DTYPES.values():
        raise ModelLoadError(f"dtype {shortened(str(wanted))} is not supported; known: {', '.join(DTYPES)}")
    return wanted


def build(config: Mapping[str, Any], dtype: torch.dtype | str | None = None) -> Architecture:
    """Build a model on `meta` from the text of its `config.json`: names, shapes, dtypes, no memory.

    Raises:
        ModelLoadError: it cannot be built; see `architecture` and `model_dtype`.
    """
    cls = architecture(config)
    with torch.device("meta"):
        return cls.from_config(config, model_dtype(config, dtype)).eval()


def parameter_specs(config: Mapping[str, Any], dtype: torch.dtype | str | None = None) -> list[ParameterSpec]:
    """List the parameters of a model as the planner wants them, from its `config.json` alone.

    Raises:
        ModelLoadError: the model cannot be built; see `build`.
    """
    model = build(config, dtype)
    return specs_of(weights_of(model, model.layers))
