"""Mixture-of-experts architectures agree with transformers in fp32, for every router option and checkpoint layout."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import offload
from offload import models
from offload.errors import ModelLoadError
from tests.models.tiny import (
    PROMPTS,
    SIZES,
    assert_ragged_logits_agree,
    bound_model,
    our_logits,
    reference_model,
    relative_error,
)

QWEN3 = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 8}
QWEN2 = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
VARIATIONS = {
    "qwen3": ("Qwen3MoeForCausalLM", QWEN3),
    "qwen3-normalised": ("Qwen3MoeForCausalLM", {**QWEN3, "norm_topk_prob": True}),
    "qwen3-sparse-step": ("Qwen3MoeForCausalLM", {**QWEN3, "decoder_sparse_step": 2}),
    "qwen3-mlp-only": ("Qwen3MoeForCausalLM", {**QWEN3, "mlp_only_layers": [0, 2]}),
    "qwen3-every-expert": ("Qwen3MoeForCausalLM", {**QWEN3, "num_experts_per_tok": 6}),
    "qwen3-one-expert": ("Qwen3MoeForCausalLM", {**QWEN3, "num_experts": 1, "num_experts_per_tok": 1}),
    "qwen3-window": ("Qwen3MoeForCausalLM", {**QWEN3, "use_sliding_window": True, "sliding_window": 4}),
    "qwen2-shared": ("Qwen2MoeForCausalLM", QWEN2),
    "qwen2-normalised": ("Qwen2MoeForCausalLM", {**QWEN2, "norm_topk_prob": True, "qkv_bias": False}),
    "qwen2-sparse-step": ("Qwen2MoeForCausalLM", {**QWEN2, "decoder_sparse_step": 2, "mlp_only_layers": [0]}),
    "qwen2-window": (
        "Qwen2MoeForCausalLM",
        {**QWEN2, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    ),
    "mixtral": ("MixtralForCausalLM", MIXTRAL),
    "mixtral-window-tied": ("MixtralForCausalLM", {**MIXTRAL, "sliding_window": 4, "tie_word_embeddings": True}),
}


EVERYWHERE = {
    "no offload": None,
    "uva": {"uva": {"cpu_offload_gb": 1}},
    "prefetch": {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 2}},
}


@pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")
@pytest.mark.parametrize("variation", VARIATIONS)
def test_logits_agree_with_transformers(variation, tmp_path):
    """Prefill and decode, one sequence, two, and a ragged batch of four; no offload and both backends."""
    name, options = VARIATIONS[variation]
    theirs, _ = reference_model(name, tmp_path, **options)
    sequences = [PROMPTS[0], PROMPTS[0][::-1]]
    with torch.inference_mode():
        expected = theirs(torch.tensor(sequences)).logits
    for config in EVERYWHERE.values():
        with offload.load(str(tmp_path), config, "cpu") as engine:
            ours = engine.parts.model
            assert relative_error(our_logits(ours, sequences), expected) < 1e-4
            assert relative_error(our_logits(ours, sequences, split=6, step="ragged"), expected) < 1e-4
            assert relative_error(our_logits(ours, sequences[:1], split=1), expected[:1]) < 1e-4
            assert_ragged_logits_agree(ours, theirs)


def stacked(tensors):
    """The same checkpoint with each layer's experts in two tensors, as transformers holds them in memory."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        leaves = ("w1", "w3", "w2") if "block_sparse_moe" in layer else ("gate_proj", "up_proj", "down_proj")
        count = 1 + max(
            int(name.split(".experts.")[1].split(".")[0]) for name in tensors if f"{layer}.experts." in name
        )
        gate, up, down = (
            torch.stack([tensors[f"{layer}.experts.{expert}.{leaf}.weight"] for expert in range(count)])
            for leaf in leaves
        )
        out[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        out[f"{layer}.experts.down_proj"] = down
    return out


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_both_layouts_of_a_checkpoint_give_the_same_tokens(name, tmp_path):
    options = QWEN3 if name.startswith("Qwen3") else MIXTRAL
    theirs, _ = reference_model(name, tmp_path, **options)
    with offload.load(str(tmp_path), device="cpu") as engine:
        expected = [answer.token_ids for answer in engine.generate(PROMPTS, 6, stop_at_eos=False)]
    tensors = load_file(tmp_path / "model.safetensors")
    fused = stacked(tensors)
    assert set(fused) != set(tensors)
    save_file(fused, tmp_path / "model.safetensors")
    with offload.load(str(tmp_path), device="cpu") as engine:
        assert [answer.token_ids for answer in engine.generate(PROMPTS, 6, stop_at_eos=False)] == expected
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        given = torch.tensor([prompt])
        every = torch.ones_like(given)  # a prompt that contains the padding token would be masked otherwise
        reference = theirs.generate(given, attention_mask=every, max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert reference[0, len(prompt) :].tolist() == tokens


CONFIGS = {
    "uva all": {"uva": {"cpu_offload_gb": 1}},
    "uva experts": {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["experts"]}},
    "uva all but experts": {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["self_attn", "gate"]}},
    "uva one weight": {"uva": {"cpu_offload_gb": 1e-9, "cpu_offload_params": ["w2_weight"]}},
    "prefetch all": {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 2}},
    "prefetch experts": {"prefetch": {"offload_group_size": 2, "offload_params": ["experts"]}},
    "prefetch attention": {"prefetch": {"offload_group_size": 1, "offload_params": ["self_attn"]}},
}


@pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")
@pytest.mark.parametrize("variation", ["qwen3-normalised", "qwen2-shared", "mixtral"])
def test_logits_and_tokens_are_the_same_wherever_the_experts_are(variation, tmp_path):
    name, options = VARIATIONS[variation]
    theirs, _ = reference_model(name, tmp_path, **options)
    sequences = [PROMPTS[0], PROMPTS[0][::-1]]
    with torch.inference_mode():
        expected = theirs(torch.tensor(sequences)).logits
    tokens, logits = {}, {}
    for config in (None, *CONFIGS.values()):
        with offload.load(str(tmp_path), config, "cpu") as engine:
            for _ in range(2):
                answers = engine.generate(PROMPTS, 6, stop_at_eos=False)
                tokens.setdefault(json.dumps(config), []).append([answer.token_ids for answer in answers])
            logits[json.dumps(config)] = our_logits(engine.parts.model, sequences, split=6, step="ragged")
    assert all(passes == [tokens["null"][0]] * 2 for passes in tokens.values())
    assert relative_error(logits["null"], expected) < 1e-4
    assert all(torch.equal(each, logits["null"]) for each in logits.values())


@pytest.mark.parametrize("favourites", [0, 1, 6])
def test_any_number_of_experts_may_be_used(favourites, tmp_path):
    """A router that sends every token to the same experts, or each token to others, uses from few to all of them."""
    theirs, config = reference_model("Qwen3MoeForCausalLM", tmp_path, **QWEN3)
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.mlp.gate.weight.mul_(0.0 if favourites == 1 else 10.0)
            if favourites == 0:
                layer.mlp.gate.weight[2:].zero_()
    theirs.save_pretrained(tmp_path)
    ours = bound_model(config, {name: each for name, each in theirs.state_dict().items()})
    tokens = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        assert relative_error(our_logits(ours, tokens.tolist()), theirs(tokens).logits) < 1e-4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7, of 6 experts: it must be between 1 and their number"),
        ({"mlp_only_layers": "0"}, 'mlp_only_layers is "0": it must be a list of layer indices'),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0: it must be a positive integer"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1: it must be true or false"),
    ],
    ids=["too-many", "dense-layers", "sparse-step", "flag"],
)
def test_wrong_router_options_are_refused(change, text):
    config = {"architectures": ["Qwen3MoeForCausalLM"], **SIZES, **QWEN3, "norm_topk_prob": True, **change}
    with pytest.raises(ModelLoadError) as refusal:
        models.build(config)
    assert text in str(refusal.value)


def test_names_are_those_that_a_vllm_config_selects():
    config = {"architectures": ["Qwen2MoeForCausalLM"], **SIZES, **QWEN2, "dtype": "bfloat16"}
    names = [spec.name for spec in models.parameter_specs(config) if spec.layer == 1]
    assert [name.removeprefix("model.layers.1.") for name in names] == [
        "input_layernorm.weight",
        "self_attn.qkv_proj.weight",
        "self_attn.qkv_proj.bias",
        "self_attn.o_proj.weight",
        "post_attention_layernorm.weight",
        "mlp.gate.weight",
        "mlp.experts.w13_weight",
        "mlp.experts.w2_weight",
        "mlp.shared_expert.gate_up_proj.weight",
        "mlp.shared_expert.down_proj.weight",
        "mlp.shared_expert_gate.weight",
    ]


def test_a_missing_expert_is_named(tmp_path):
    reference_model("Qwen3MoeForCausalLM", tmp_path, **QWEN3)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"missing tensor \"model.layers.1.mlp.experts.4.up_proj.weight\""):
        offload.load(str(tmp_path), device="cpu")


@pytest.mark.parametrize("variation", ["qwen3-normalised", "qwen2-shared", "mixtral"])
def test_a_router_in_bf16_rounds_where_transformers_does(variation, tmp_path):
    name, options = VARIATIONS[variation]
    theirs, config = reference_model(name, tmp_path, **options)
    router = theirs.to(torch.bfloat16).model.layers[1].mlp.gate
    ours = models.build(config, torch.bfloat16).layers[1].mlp
    ours.gate.to_empty(device="cpu")
    x = torch.randn(7, SIZES["hidden_size"], dtype=torch.bfloat16)
    with torch.inference_mode():
        ours.gate.weight.copy_(router.weight)
        _, weights, ids = router(x)
        our_ids, our_weights = ours.route(x)
    assert torch.equal(our_ids, ids)
    assert our_weights.dtype is weights.dtype and torch.equal(our_weights, weights)
