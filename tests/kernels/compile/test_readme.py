"""The page that other engines read: its examples run."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F

import offload_kernels

README = Path(__file__).parents[3] / "kernels" / "README.md"
PLAIN, LOCKED, LAYERS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)[:3]


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
