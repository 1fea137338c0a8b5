"""`offload plan`: what it prints fits, is the best that a full search finds, and can be pasted."""

import json
import re
import shlex
from dataclasses import replace

import pytest

from offload.cli import main
from offload.commands.plan import memory_bytes
from offload.config import OffloadConfig
from offload.planner import Workload, predict, search
from offload.virtual import load_profile

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 5,
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MIB = 1 << 20


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def plan(config, *words):
    return main(["plan", "--model-config", str(config), "--device", "virtual:h200-pcie5", "--context", "64", *words])


@pytest.mark.parametrize("memory", [14, 20])
def test_the_best_is_the_best_of_all(config, memory):
    profile = replace(load_profile("h200-pcie5"), memory_bytes=memory * MIB)
    workload = Workload(config, TINY, context=64)
    found = search(workload, profile)
    everything = search(workload, profile, limit=10_000)
    assert len(found) <= 12 and len(found) <= len(everything)
    assert found[0].step_s == everything[0].step_s
    for prediction in found:
        assert prediction.peak_device_bytes <= memory * MIB
        assert prediction.bound_s <= prediction.step_s
    assert {prediction.backend for prediction in found} == {"uva", "prefetch"}
    assert [p.step_s for p in found] == sorted(p.step_s for p in found)


def test_a_prediction_can_be_made_again(config):
    profile = replace(load_profile("h200-pcie5"), memory_bytes=17 * MIB)
    workload = Workload(config, TINY, context=64)
    best = search(workload, profile)[0]
    assert predict(workload, profile, best.config) == best


def test_what_is_printed_can_be_pasted(config, capsys):
    assert plan(config, "--device-memory", "17MiB", "--top", "3") == 0
    text = capsys.readouterr().out
    assert "all times are simulated" in text
    [words] = re.findall(r"^--offload-config .*$", text, re.MULTILINE)
    assert OffloadConfig.from_json(shlex.split(words)[1]).is_offloading_enabled()
    assert len(re.findall("^.* (uva|prefetch)  .*=", text, re.MULTILINE)) == 3


def test_json(config, capsys):
    assert plan(config, "--device-memory", "17MiB", "--json", "--batch", "2") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["simulated"] and document["profile"] == "h200-pcie5" and document["batch"] == 2
    first = document["predictions"][0]
    assert first["tokens_per_s"] == pytest.approx(2 / first["step_s"])


def test_a_model_that_fits_needs_nothing(config, capsys):
    assert plan(config) == 0
    assert "no offload is needed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--device-memory", "1MiB"], 3, "no configuration fits in"),
        (["--device-memory", "lots"], 2, "write 24GiB or 24GB"),
        (["--device", "cuda"], 2, "is no virtual GPU"),
        (["--device", "virtual:h300"], 3, "no profile 'h300'"),
        (["--model-config", "llama-9"], 3, "one of llama-3.1-70b"),
        (["--context", "9999"], 1, "the context is 4096"),
    ],
)
def test_refusals(config, capsys, words, code, line):
    assert plan(config, *words) == code
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"), [("24GiB", 24 << 30), ("24", 24 << 30), ("24 GB", 24 * 10**9), ("0.5mib", 1 << 19)]
)
def test_amounts_of_memory(text, expected):
    assert memory_bytes(text) == expected
