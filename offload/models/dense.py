"""The dense architectures: one decoder, and what each does differently as data.

Source: defaults are those of transformers' configuration classes, since published `config.json` files leave them out.
"""

from offload.models.config import Family, no_window, same_window, window_by_layer
from offload.models.decoder import Decoder

_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


class LlamaForCausalLM(Decoder):
    """Llama 1 to 3, and what keeps its architecture (SmolLM2, Yi)."""

    family = Family(no_window, {"max_position_embeddings": 2048})


class MistralForCausalLM(Decoder):
    """Mistral 7B and Nemo: one sliding window for every layer, or none."""

    family = Family(
        same_window,
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        qkv_bias=False,
        o_bias=False,
    )


class Qwen2ForCausalLM(Decoder):
    """Qwen 2 and 2.5: a bias on queries, keys and values, windows in the later layers if at all."""

    family = Family(window_by_layer, _QWEN_DEFAULTS, qkv_bias=True, o_bias=False)


class Qwen3ForCausalLM(Decoder):
    """Qwen 3: queries and keys are normalised per head, and heads have their own width."""

    family = Family(window_by_layer, {**_QWEN_DEFAULTS, "head_dim": 128}, qk_norm=True)
