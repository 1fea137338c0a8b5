"""Which `config.json` is taken, which is refused and with what words, and the order and sizes of the parameters."""

import json
import math
from pathlib import Path

import pytest
import torch

from offload import models
from offload.backend import weights_of
from offload.errors import ModelLoadError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}


def test_unknown_architecture_lists_the_known():
    with pytest.raises(ModelLoadError) as refusal:
        models.architecture({"architectures": ["GPT2LMHeadModel"]})
    assert 'architecture "GPT2LMHeadModel" is not known; known: ' in str(refusal.value)
    assert "LlamaForCausalLM, MistralForCausalLM" in str(refusal.value)
    assert "Qwen2ForCausalLM" in str(refusal.value) and "Qwen3ForCausalLM" in str(refusal.value)


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", [3], [["LlamaForCausalLM"]]])
def test_architectures_must_be_a_list_of_names(names):
    with pytest.raises(ModelLoadError, match="is not known; known: "):
        models.architecture({"architectures": names})


def test_quantised_checkpoints_are_refused():
    with pytest.raises(ModelLoadError, match='checkpoint is quantised \\("awq"\\), which is not supported yet'):
        models.architecture({**LLAMA, "quantization_config": {"quant_method": "awq"}})


REFUSALS = {
    "missing-size": ({"hidden_size": None}, "config.json has no hidden_size"),
    "size-of-wrong-type": ({"vocab_size": "64"}, 'vocab_size is "64": it must be a positive integer'),
    "size-of-true": ({"num_hidden_layers": True}, "num_hidden_layers is true: it must be a positive integer"),
    "zero": ({"num_hidden_layers": 0}, "num_hidden_layers is 0: it must be a positive integer"),
    "flag": ({"tie_word_embeddings": "no"}, 'tie_word_embeddings is "no": it must be true or false'),
    "number": ({"rms_norm_eps": "1e-5"}, 'rms_norm_eps is "1e-5": it must be a number'),
    "activation": ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported; known: silu'),
    "heads": ({"num_key_value_heads": 3}, "4 attention heads of 8 channels and 3 key-value heads do not fit together"),
    "odd-head": ({"head_dim": 7}, "channels must be even"),
    "rope-type": (
        {"rope_scaling": {"type": "dynamic"}},
        'rope type "dynamic" is not supported; known: default, linear',
    ),
    "rope-list": ({"rope_scaling": [2]}, "rope_scaling is [2]: it must be an object"),
    "rope-factor": ({"rope_scaling": {"type": "linear"}}, 'rope_parameters.factor of rope type "linear" is null'),
    "rope-partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; known: 1.0"),
    "theta": (
        {"rope_theta": "big"},
        'rope_parameters.rope_theta of rope type "default" is "big": give a positive number',
    ),
    "theta-zero": ({"rope_theta": 0}, 'rope_parameters.rope_theta of rope type "default" is 0: give a positive number'),
    "factor-zero": ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_parameters.factor of rope type"),
    "factor-nan": ({"rope_scaling": {"type": "linear", "factor": math.nan}}, "rope_parameters.factor of rope type"),
    "eps-nan": ({"rms_norm_eps": math.nan}, "rms_norm_eps is NaN: it must be a number"),
    "size-too-large": ({"hidden_size": 10**30}, "it must be a positive integer below 2^31"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_config_is_refused(case):
    changes, message = REFUSALS[case]
    with pytest.raises(ModelLoadError) as refusal:
        models.build({**LLAMA, **changes})
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention", "chunked_attention"], 3])
def test_wrong_layer_types_are_refused(kinds):
    with pytest.raises(ModelLoadError, match="layer_types .* must have 2 entries"):
        models.build({**QWEN2, "layer_types": kinds})


def test_wrong_dtype_is_refused():
    with pytest.raises(ModelLoadError, match='dtype "torch.int8" is not supported; known: bfloat16, float16, float32'):
        models.build(LLAMA, torch.int8)


@pytest.mark.parametrize(
    ("config", "asked", "dtype"),
    [
        ({}, None, torch.float32),
        ({"torch_dtype": "bfloat16"}, None, torch.bfloat16),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, None, torch.float16),
        ({"dtype": "float16"}, "torch.bfloat16", torch.bfloat16),
        ({"dtype": "float16"}, torch.float32, torch.float32),
    ],
)
def test_dtype_is_the_one_asked_for_else_the_one_of_the_file(config, asked, dtype):
    assert models.model_dtype(config, asked) == dtype


def test_windows_of_the_layers():
    def windows(**changes):
        return models.build({**QWEN2, "num_hidden_layers": 4, **changes}).config.windows

    assert windows(max_window_layers=1) == (None, 8, 8, 8)
    assert windows() == (None,) * 4
    assert windows(max_window_layers=1, use_sliding_window=False) == (None,) * 4
    alternating = ["sliding_attention", "full_attention"] * 2
    assert windows(layer_types=alternating) == (8, None, 8, None)
    assert windows(architectures=["MistralForCausalLM"]) == (8,) * 4
    assert windows(architectures=["MistralForCausalLM"], sliding_window=None) == (None,) * 4
    assert windows(architectures=["LlamaForCausalLM"]) == (None,) * 4


def test_left_out_keys_have_the_values_of_their_architecture():
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert models.build(config).config.kv_heads == 4
    assert models.build(config).config.context == 2048
    mistral = models.build({**config, "architectures": ["MistralForCausalLM"], "num_attention_heads": 16}).config
    assert (mistral.kv_heads, mistral.windows[0], mistral.context) == (8, 4096, 131072)
    assert models.build({**config, "architectures": ["Qwen3ForCausalLM"]}).config.head_dim == 128


def test_parameters_have_the_names_order_and_sizes_that_the_planner_expects():
    cases = json.loads((Path(__file__).parents[1] / "data" / "plan.json").read_text())
    expected = [(entry["name"], entry["nbytes"]) for entry in cases["layer_parameters"]["dense"]]
    config = {
        **LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    specs = models.parameter_specs(config, torch.bfloat16)
    for layer in range(2):
        ours = [spec for spec in specs if spec.layer == layer]
        assert [spec.name for spec in ours] == [f"model.layers.{layer}.{name}" for name, _ in expected]
    assert [spec.name for spec in specs if spec.layer is None] == [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert specs[0].nbytes == 64 * 8192 * 2


def test_biases_and_head_norms_follow_their_linear():
    config = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "attention_bias": True, "num_hidden_layers": 1}
    names = [spec.name.removeprefix("model.layers.0.") for spec in models.parameter_specs(config) if spec.layer == 0]
    assert names == [
        "input_layernorm.weight",
        "self_attn.qkv_proj.weight",
        "self_attn.qkv_proj.bias",
        "self_attn.o_proj.weight",
        "self_attn.o_proj.bias",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_up_proj.weight",
        "mlp.down_proj.weight",
    ]


def test_a_tied_head_shares_its_storage_and_is_not_expected_in_a_file():
    model = models.build({**LLAMA, "tie_word_embeddings": True})
    storages = {weight.name: weight.storage for weight in weights_of(model, model.layers)}
    assert storages["lm_head.weight"] == storages["model.embed_tokens.weight"]
    assert "lm_head.weight" not in model.checkpoint_slices()
    assert model.ignored("lm_head.weight") and model.ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
    untied = models.build(LLAMA)
    assert "lm_head.weight" in untied.checkpoint_slices() and not untied.ignored("lm_head.weight")


def test_models_are_built_without_memory():
    assert all(parameter.is_meta for parameter in models.build({**LLAMA, "hidden_size": 1 << 20}).parameters())


def test_checkpoint_slices_cover_every_parameter_once():
    model = models.build({**QWEN2, "architectures": ["Qwen3ForCausalLM"], "attention_bias": True})
    rows = {name: [False] * parameter.shape[0] for name, parameter in model.named_parameters()}
    for place in model.checkpoint_slices().values():
        count = place.rows or place.shape[0]
        for row in range(place.start, place.start + count):
            assert not rows[place.parameter][row]
            rows[place.parameter][row] = True
    assert all(all(covered) for covered in rows.values())
