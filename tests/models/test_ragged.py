"""Right-padded batches: every sequence gets the logits that it gets alone, whatever lies in the rows behind its end."""

import pytest

from tests.models.tiny import CONTEXT, assert_ragged_logits_agree, bound_model, reference_model

VARIATIONS = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 4}),
    "qwen2-mixed-windows": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8, "num_key_value_heads": 3}),
}


@pytest.mark.parametrize("rows", [None, CONTEXT], ids=["sliced", "whole-cache"])
@pytest.mark.parametrize("variation", VARIATIONS)
def test_ragged_batch_agrees_with_transformers_one_by_one(variation, rows, tmp_path):
    name, options = VARIATIONS[variation]
    theirs, config = reference_model(name, tmp_path, **options)
    ours = bound_model(config, theirs.state_dict())
    assert_ragged_logits_agree(ours, theirs, rows)
