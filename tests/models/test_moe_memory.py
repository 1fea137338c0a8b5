"""Experts go from either layout of a checkpoint straight into the slab: no tensor of theirs exists twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offload import models

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "dtype": "float32",
    "vocab_size": 97,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 64,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
EXPERT_BYTES = 2 * 64 * 3 * 256 * 512 * 4
SCRIPT = """
import sys, threading, warnings
import offload, offload.assemble, offload.uva, offload.loader, offload.models.moe
warnings.simplefilter("ignore")

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

config = {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["experts"]}}
done, peak = threading.Event(), 0

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        done.wait(0.001)

before = anonymous()
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
engine = offload.load(sys.argv[1], config, "cpu", max_context=64)
done.set()
watcher.join()
report = engine.report()
print(max(peak, anonymous()) - before, report.locked_bytes, report.offloaded_bytes)
"""


@pytest.mark.parametrize("layout", ["an-expert-a-tensor", "stacked"])
def test_loading_experts_needs_the_slab_and_little_more(layout, tmp_path):
    model = models.build(CONFIG)
    if layout == "an-expert-a-tensor":
        model.choose_layout({f"model.layers.{i}.mlp.experts.0.gate_proj.weight" for i in range(2)})
    places = model.checkpoint_slices()
    assert sum("experts" in name for name in places) == (4 if layout == "stacked" else 2 * 64 * 3)
    save_file({name: torch.ones(place.shape) for name, place in places.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    grown_bytes, locked_bytes, offloaded_bytes = map(int, run.stdout.split())
    assert offloaded_bytes == EXPERT_BYTES
    # One stacked tensor of one layer is 64 MiB.
    assert EXPERT_BYTES <= grown_bytes <= locked_bytes + 32 * 2**20
