"""The main job on a real GPU: both backends, captured steps, and the count of ties."""

import json

import pytest

from bench.__main__ import main

pytestmark = pytest.mark.gpu

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
CONFIGS = ('{"uva": {"cpu_offload_gb": 1}}', '{"prefetch": {"offload_group_size": 2}}')


@pytest.mark.parametrize("graph", [[], ["--graph"]], ids=["eager", "graph"])
def test_every_configuration_gives_the_same_tokens_or_ties(tmp_path, capsys, graph):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    words = ["--model-config", str(path), "--device", "cuda", "-p", "64,300", "-n", "8", "-b", "1,3", *graph]
    configs = [word for config in CONFIGS for word in ("--offload-config", config)]
    picture = ["--plot", str(tmp_path / "p.png"), "--profile", "h200-pcie5"]
    assert main(["budget", *words, *configs, *picture, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["machine"]["gpus"] and len(document["rows"]) == 3 * 6
    for row in document["rows"]:
        assert not row["simulated"] and row["bound_s"] > 0 and row["step_s"] > 0
        assert row["tokens"] == "reference" or "equal" in row["tokens"]
