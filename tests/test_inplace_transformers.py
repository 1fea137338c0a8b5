"""`offload_` under transformers' own models: from_pretrained, offload_, generate, the same tokens."""

import pytest
import torch
import transformers

import offload
from offload.device import open_device
from offload.linear import HostLinear

pytestmark = pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3-moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "gemma": transformers.GemmaConfig(**SIZES),
    "phi": transformers.PhiConfig(**{**SIZES, "num_key_value_heads": 4}),
    "gpt-neox": transformers.GPTNeoXConfig(**SIZES),
    "opt": transformers.OPTConfig(
        vocab_size=97,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=97, n_positions=64, n_embd=32, n_layer=4, n_head=4, eos_token_id=None, pad_token_id=0
    ),
}
ENCODERS = {
    "bert": transformers.BertConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    ),
    "t5": transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
}
CONFIGS = {
    "uva-all": {"uva": {"cpu_offload_gb": 1}},
    "uva-part": {"uva": {"cpu_offload_gb": 20_000 / 2**30}},
    "prefetch-all": {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 2}},
    "prefetch-half": {"prefetch": {"offload_group_size": 2, "offload_num_in_group": 1, "offload_prefetch_step": 1}},
}
PROMPT = torch.tensor([[5, 3, 96, 1, 44], [7, 8, 9, 10, 11]])


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    """A folder that from_pretrained reads, with weights that make different tokens likely."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


def opened(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tokens(model, **options):
    given = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 12, "do_sample": False, **options}
    return model.generate(PROMPT, **given).tolist()


def test_tokens_are_the_same_and_weights_come_back(folder):
    model = opened(folder)
    expected = tokens(model)
    assert len({token for row in expected for token in row[5:]}) > 3
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for config in CONFIGS.values():
        with offload.offload_(model, config, device="cpu") as handle:
            assert handle.plan.offloaded
            for _ in range(2):
                assert tokens(model) == expected
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert tokens(model) == expected


@pytest.mark.parametrize("config", [CONFIGS["uva-all"], CONFIGS["prefetch-half"]], ids=["uva", "prefetch"])
def test_beams_are_the_same(folder, config):
    model = opened(folder)
    expected = tokens(model, num_beams=3, max_new_tokens=6)
    with offload.offload_(model, config, device="cpu"):
        assert tokens(model, num_beams=3, max_new_tokens=6) == expected


@pytest.mark.parametrize("config", [CONFIGS["uva-all"], CONFIGS["prefetch-all"]], ids=["uva", "prefetch"])
def test_the_virtual_gpu_gives_the_same_tokens_and_sees_every_weight_cross(folder, config):
    model, device = opened(folder), open_device("virtual:h200-pcie5")
    expected = tokens(model, max_new_tokens=3)
    with offload.offload_(model, config, device=device) as handle:
        assert tokens(model, max_new_tokens=3) == expected
        device.mark_step("pp")
        experts = sum(each.numel() * 4 for name, each in model.named_parameters() if "experts" in name)
        assert device.step_report().bus_bytes >= 3 * (handle.plan.offloaded_bytes - experts)
    assert tokens(model, max_new_tokens=3) == expected


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("name", "layers"), [("bert", None), ("t5", None), ("t5", "encoder.block")])
def test_encoders_give_the_same(name, layers, config):
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(ENCODERS[name]).eval()
    given = {"input_ids": PROMPT, **({"decoder_input_ids": PROMPT} if name == "t5" else {})}
    with torch.inference_mode():
        expected = model(**given).last_hidden_state
        with offload.offload_(model, config, layers=layers, device="cpu") as handle:
            assert handle.layers == (layers or {"bert": "encoder.layer", "t5": "decoder.block"}[name])
            for _ in range(2):
                assert torch.equal(model(**given).last_hidden_state, expected)
        assert torch.equal(model(**given).last_hidden_state, expected)


def test_an_offloaded_model_saves_as_it_is(folder, tmp_path):
    model = opened(folder)
    expected = tokens(model)
    with offload.offload_(model, CONFIGS["prefetch-all"], device="cpu"):
        tokens(model)
        model.save_pretrained(tmp_path)
    again = opened(tmp_path)
    assert type(again) is type(model)
    assert tokens(again) == expected


def test_selectors_are_the_modules_own_names(tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(MODELS["llama"])
    config = {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["q_proj", "mlp.down_proj"]}}
    with offload.offload_(model, config, device="cpu") as handle:
        assert handle.layers == "model.layers"
        assert len(handle.plan.offloaded) == 8
        linears = {type(layer.self_attn.q_proj) for layer in model.model.layers}
        assert linears == {HostLinear}
        assert type(model.model.layers[0].self_attn.k_proj) is torch.nn.Linear


def test_gradients_are_refused_and_work_after_restore(tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(MODELS["llama"])
    with offload.offload_(model, CONFIGS["uva-all"], device="cpu"):
        with pytest.raises(ValueError, match="runs without autograd only"):
            model(PROMPT)
        with torch.no_grad():
            model(PROMPT)
    model(PROMPT, labels=PROMPT).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
