"""Tiny random models of transformers, and the same weights bound to ours without loader or backend."""

import json

import torch
import transformers

from offload import models
from offload.kv_cache import DecodeRagged, DecodeTogether, KVCache, Prefill, kv_bytes

CONFIGS = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig,
    "Qwen2MoeForCausalLM": transformers.Qwen2MoeConfig,
    "MixtralForCausalLM": transformers.MixtralConfig,
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


# Four sequences of unlike lengths.
PROMPTS = [[5, 3, 96, 1, 0, 44, 17, 8, 80, 2, 9, 31, 7], [11, 12], [90, 4, 4, 4, 23], [61]]


class StateDict:
    """A checkpoint that is a dict of tensors."""

    def __init__(self, tensors):
        self.tensors = dict(tensors)

    def read_into(self, checkpoint_name, destination):
        source = self.tensors.pop(checkpoint_name)
        assert source.shape == destination.shape, checkpoint_name
        destination.copy_(source)


def reference_model(name, folder, seed=0, **options):
    """A transformers model with weights that matter, saved to `folder`; returns it and its config.json."""
    torch.manual_seed(seed)
    config = CONFIGS[name](**{**SIZES, **options}, attn_implementation="eager")
    model = getattr(transformers, name)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Also norms and biases, which are ones and zeros otherwise and would hide that they are not used.
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.25)
    model.save_pretrained(folder)
    return model, json.loads((folder / "config.json").read_text())


def bound_model(config, state):
    """Our model of `config` in fp32 on the CPU, every parameter filled from `state`."""
    model = models.build(config, torch.float32)
    model.choose_layout(state)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    tensors = StateDict(state)
    model.load_weights(tensors, model.get_parameter)
    left = [name for name in tensors.tensors if not model.ignored(name)]
    assert not left, left
    model.prepare(torch.device("cpu"))
    return model


def our_logits(model, sequences, context=64, split=None, step="together"):
    """Logits of all positions, (B, T, V): the first `split` tokens by a prefill, the others one by one."""
    tokens = torch.tensor(sequences)
    batch, length = tokens.shape
    split = length if split is None else split
    memory = torch.full((kv_bytes(model.cache_shape, batch, context, torch.float32),), 255, dtype=torch.uint8)
    cache = KVCache(memory, model.cache_shape, batch, context, torch.float32)
    positions = torch.arange(length).expand(batch, -1)
    with torch.inference_mode():
        cache.step = Prefill(cache, split)
        logits = [model.logits(model(tokens[:, :split], positions[:, :split], cache))]
        for position in range(split, length):
            here = slice(position, position + 1)
            ragged = DecodeRagged(cache, positions[:, here], context)
            cache.step = DecodeTogether(cache, position) if step == "together" else ragged
            logits.append(model.logits(model(tokens[:, here], positions[:, here], cache)))
    return torch.cat(logits, 1)


def relative_error(actual, expected):
    """Largest difference over the largest expected value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


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


def assert_ragged_logits_agree(ours, theirs, rows=None):
    """A right-padded batch of `PROMPTS` and what follows, against transformers one sequence at a time."""
    following = [[index * 7 + step for step in range(NEW)] for index in range(len(PROMPTS))]
    with torch.inference_mode():
        actual = ragged_logits(ours, PROMPTS, following, rows)
        for index, (prompt, tail) in enumerate(zip(PROMPTS, following, strict=True)):
            expected = theirs(torch.tensor([prompt + tail])).logits[0, len(prompt) - 1 :]
            assert relative_error(actual[index], expected) < 1e-4
