"""The page that other engines read: its examples run."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import triton

import offload_kernels
from bench import codegen
from tests.kernels.experts_reference import assert_accurate, random_layer

README = Path(__file__).parents[3] / "kernels" / "README.md"
PLAIN, LOCKED, LAYERS, EXPERTS, VLLM = re.findall(
    r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL
)


def run_on_the_cpu(text, monkeypatch):
    """Execute an example with the CPU as its device, where nothing is locked."""
    monkeypatch.setattr(offload_kernels, "page_lock", lambda tensor: nullcontext(), raising=False)
    names = {}
    exec(text.replace('"cuda"', '"cpu"'), names)
    return names


def test_plain_torch_in_the_interpreter():
    check = "\nassert (y - x @ weight.t()).abs().max() < 1e-3, y"
    variables = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": "kernels"}
    subprocess.run([sys.executable, "-c", PLAIN + check], check=True, env=variables, cwd=README.parents[1])


def test_locked_weight(monkeypatch):
    assert run_on_the_cpu(LOCKED, monkeypatch)["y"].shape == (1, 4096)


def test_layers_of_a_model(monkeypatch):
    names = run_on_the_cpu(LAYERS, monkeypatch)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=False))
    x = torch.randn(3, 8)
    with torch.inference_mode():
        expected = model(x)
        for layer in (model[0], model[2]):
            names["keep_on_host"](layer)
        assert torch.equal(model(x), expected)
    assert type(model[0]) is names["HostLinear"]
    assert torch.equal(F.linear(x, model[0].weight, model[0].bias), model[0](x))


def test_experts():
    names = {}
    exec(EXPERTS, names)
    assert names["y"].shape == (5, 256) and names["y"].isfinite().all()


class Stock:
    """What vLLM's own methods have that the recipe builds on; their results are marked."""

    def __init__(self, moe=None):
        self.moe = moe

    def process_weights_after_loading(self, layer):
        layer.processed = True

    def apply(self, layer, *arguments):
        return "stock"


@pytest.fixture
def vllm(monkeypatch):
    """The recipe's names, and the config it registers, with stand-ins for vLLM's modules."""
    registered, layers = {}, "vllm.model_executor.layers"
    parts = {
        "fused_moe": {"RoutedExperts": type("RoutedExperts", (SimpleNamespace,), {})},
        "fused_moe.unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod": Stock},
        "linear": {
            "LinearBase": type("LinearBase", (SimpleNamespace,), {}),
            "UnquantizedLinearMethod": Stock,
            "register_weight_loader_v2_supported_method": lambda method: method,
        },
        "quantization": {
            "register_quantization_config": lambda name: lambda config: registered.setdefault(name, config)
        },
        "quantization.base_config": {"QuantizationConfig": object},
    }
    for name in ("vllm", "vllm.model_executor", layers):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for part, contents in parts.items():
        module = ModuleType(f"{layers}.{part}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    names = {}
    exec(VLLM, names)
    names["register"]()
    return names, registered["host_kernels"]


@pytest.mark.parametrize("on_host", [True, False])
def test_vllm_linear(vllm, monkeypatch, on_host):
    names, config = vllm
    monkeypatch.setitem(names, "is_host_resident", lambda weight: on_host)
    layer, x, bias = names["LinearBase"](weight=torch.randn(70, 40)), torch.randn(3, 40), torch.randn(70)
    method = config.from_config({}).get_quant_method(layer, "model.layers.0")
    method.process_weights_after_loading(layer)
    y = method.apply(layer, x, bias)
    assert layer.processed
    assert torch.equal(y, F.linear(x, layer.weight, bias)) if on_host else y == "stock"


STAYS = {
    "resident": {"on_host": False},
    "shared": {"shared": object()},
    "expert-parallel": {"expert_map": torch.arange(4)},
    "bias": {"has_bias": True},
    "gelu": {"activation": SimpleNamespace(value="gelu")},
    "weighted-input": {"apply_router_weight_on_input": True},
}


@pytest.mark.parametrize("changed", [{}, *STAYS.values()], ids=["ours", *STAYS])
def test_vllm_experts(vllm, monkeypatch, changed):
    names, config = vllm
    changed = dict(changed)
    on_host, shared, has_bias = (
        changed.pop(name, otherwise) for name, otherwise in (("on_host", True), ("shared", None), ("has_bias", False))
    )
    monkeypatch.setitem(names, "is_host_resident", lambda weight: on_host)
    data = random_layer(5, 4, 64, 32, 2, torch.float32)
    settings = {"activation": SimpleNamespace(value="silu"), "apply_router_weight_on_input": False, "expert_map": None}
    layer = names["RoutedExperts"](
        w13_weight=data.w13, w2_weight=data.w2, moe_config=SimpleNamespace(has_bias=has_bias), **settings | changed
    )
    method = config().get_quant_method(layer, "model.layers.0.mlp.experts")
    method.process_weights_after_loading(layer)
    y = method.apply(layer, data.x, data.topk_weights, data.topk_ids.int(), shared, None)
    if changed or shared or has_bias or not on_host:
        assert y == "stock"
    else:
        assert_accurate(y, data)


def test_vllm_leaves_other_layers_alone(vllm):
    assert vllm[1]().get_quant_method(torch.nn.Embedding(2, 2), "model.embed_tokens") is None


def test_the_c_example_compiles_against_what_the_command_writes(tmp_path):
    text = README.read_text()
    (words,) = re.findall(r"^    python (-m offload_kernels\.export .*)$", text, re.MULTILINE)
    (source,) = re.findall(r"^```c\n(.*?)^```$", text, re.M | re.S)
    command = [sys.executable, *words.replace("generated/", str(tmp_path)).split()]
    subprocess.run(command, check=True, cwd=README.parent)
    (tmp_path / "example.c").write_text(source)
    cuda_h = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    compiler = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{tmp_path}", f"-isystem{cuda_h}"]
    subprocess.run([*compiler, str(tmp_path / "example.c")], check=True)


def test_the_table_of_tiles_is_the_one_that_was_saved():
    saved = json.loads((README.parents[1] / "bench" / "results" / "codegen.json").read_text())
    rows = [codegen.Row(**row) for row in saved["rows"]]
    table = README.read_text().partition("<!-- tiles -->\n")[2].partition("<!-- /tiles -->")[0]
    assert table == codegen.summary(rows) + "\n"
    now = {(case.kernel, case.rows, f"sm_{case.arch}", case.dtype): case.tile for case in codegen.cases()}
    for row in rows:
        tile = now.pop((row.kernel, row.rows, row.arch, row.dtype))
        assert (row.block_n, row.block_m, row.block_k, row.stages) == (
            tile.block_n,
            tile.block_m,
            tile.block_k,
            tile.stages,
        )
    assert not now
