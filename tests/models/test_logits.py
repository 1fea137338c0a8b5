"""Every architecture with every variation agrees with transformers in fp32."""

import pytest
import torch

from tests.models.tiny import PROMPTS, bound_model, our_logits, reference_model, relative_error

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0}
VARIATIONS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-multi-head": ("LlamaForCausalLM", {"num_key_value_heads": 6}),
    "llama-one-key-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaForCausalLM", {"head_dim": 20}),
    "llama-eps": ("LlamaForCausalLM", {"rms_norm_eps": 0.1}),
    "llama-theta": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "llama-linear": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-yarn": ("LlamaForCausalLM", {"rope_parameters": YARN, "head_dim": 16}),
    "llama-yarn-mscale": (
        "LlamaForCausalLM",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 8, "truncate": False}},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen2-layer-types": (
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2-yarn": ("Qwen2ForCausalLM", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "qwen3-head-dim": ("Qwen3ForCausalLM", {"head_dim": 24, "attention_bias": True}),
    "qwen3-window": (
        "Qwen3ForCausalLM",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    ),
}


@pytest.mark.parametrize("variation", VARIATIONS)
def test_logits_agree_with_transformers(variation, tmp_path):
    name, options = VARIATIONS[variation]
    theirs, config = reference_model(name, tmp_path, **options)
    ours = bound_model(config, theirs.state_dict())
    sequences = [PROMPTS[0], PROMPTS[0][::-1]]
    with torch.inference_mode():
        expected = theirs(torch.tensor(sequences)).logits
    assert relative_error(our_logits(ours, sequences), expected) < 1e-4
    assert relative_error(our_logits(ours, sequences, split=6), expected) < 1e-4
    assert relative_error(our_logits(ours, sequences, split=6, step="ragged"), expected) < 1e-4
    assert relative_error(our_logits(ours, sequences[:1], split=1), expected[:1]) < 1e-4
