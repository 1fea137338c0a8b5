"""Right-padded batches: every sequence gets the logits that it gets alone, whatever lies in the rows behind its end."""

import pytest
import torch

from offload.kv_cache import DecodeRagged, KVCache, Prefill, kv_bytes
from tests.models.tiny import PROMPTS, bound_model, reference_model, relative_error

VARIATIONS = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 4}),
    "qwen2-mixed-windows": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8, "num_key_value_heads": 3}),
}
CONTEXT, NEW = 32, 5


def ragged_logits(model, prompts, following, rows):
    """Logits (B, 1 + NEW, V): after each prompt, and after each of its following tokens."""
    batch, longest = len(prompts), max(map(len, prompts))
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    memory = torch.full((kv_bytes(model.cache_shape, batch, CONTEXT, torch.float32),), 255, dtype=torch.uint8)
    cache = KVCache(memory, model.cache_shape, batch, CONTEXT, torch.float32)
    tokens = torch.tensor([prompt + [96] * (longest - len(prompt)) for prompt in prompts])
    cache.step = Prefill(cache, longest)
    hidden = model(tokens, torch.arange(longest).expand(batch, -1), cache)
    logits = [model.logits(hidden[torch.arange(batch), lengths - 1])]
    for index in range(NEW):
        positions = (lengths + index)[:, None]
        cache.step = DecodeRagged(cache, positions, rows or longest + index + 1)
        hidden = model(torch.tensor([[tail[index]] for tail in following]), positions, cache)
        logits.append(model.logits(hidden[:, 0]))
    return torch.stack(logits, 1)


@pytest.mark.parametrize("rows", [None, CONTEXT], ids=["sliced", "whole-cache"])
@pytest.mark.parametrize("variation", VARIATIONS)
def test_ragged_batch_agrees_with_transformers_one_by_one(variation, rows, tmp_path):
    name, options = VARIATIONS[variation]
    theirs, config = reference_model(name, tmp_path, **options)
    ours = bound_model(config, theirs.state_dict())
    following = [[index * 7 + step for step in range(NEW)] for index in range(len(PROMPTS))]
    with torch.inference_mode():
        actual = ragged_logits(ours, PROMPTS, following, rows)
        for index, (prompt, tail) in enumerate(zip(PROMPTS, following, strict=True)):
            expected = theirs(torch.tensor([prompt + tail])).logits[0, len(prompt) - 1 :]
            assert relative_error(actual[index], expected) < 1e-4
