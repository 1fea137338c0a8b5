"""The page that other engines read: its examples run."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

import offload_kernels
from bench import codegen

README = Path(__file__).parents[3] / "kernels" / "README.md"
PLAIN, LOCKED, LAYERS, EXPERTS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)[:4]


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


def test_the_c_example_compiles_against_what_the_command_writes(tmp_path):
    text = README.read_text()
    (words,) = re.findall(r"^    python (-m offload_kernels\.export .*)$", text, re.MULTILINE)
    (source,) = re.findall(r"^```c\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
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
