"""The engine on `meta`: a model of any size, from its `config.json` alone."""

import json

import offload
from tests.tiny_folder import CONFIG

LARGE = {
    **CONFIG,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
HALF = {"prefetch": {"offload_group_size": 2, "offload_num_in_group": 1, "offload_prefetch_step": 2}}


def test_a_model_too_large_for_this_machine_decodes_on_meta(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LARGE))
    for graph in (False, True):
        with offload.load(config, HALF, "virtual:h200-pcie5", load_format="meta", graph=graph) as engine:
            layer_bytes = 2 * (8192 * 10240 + 8192 * 8192 + 3 * 8192 * 28672 + 2 * 8192)
            assert engine.report().offloaded_bytes == 3 * layer_bytes
            assert [len(one.token_ids) for one in engine.generate([[1, 2, 3], [4]], 4, stop_at_eos=False)] == [4, 4]
            assert engine.report().kv_bytes == 2 * 6 * 2 * 8 * 7 * 128 * 2
            sampled = engine.generate([[1, 2, 3]], 3, temperature=1.0, seed=1, stop_at_eos=False)
            assert len(sampled[0].token_ids) == 3
