"""The main job on small models: every configuration a row, tokens compared, what does not fit said, Ctrl-C harmless."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.machine import REPOSITORY
from offload.virtual.profiles import dump_profile, load_profile

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "model_type": "llama",
}
PREFETCH = '{"prefetch": {"offload_group_size": 3}}'
QUICK = ["-p", "6", "-n", "3", "-r", "2"]


@pytest.fixture
def config(tmp_path):
    """A `config.json` of six small layers, and a place for the picture."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def budget(config, *words, picture="picture.png"):
    return main(["budget", "--model-config", str(config), "--plot", str(config.parent / picture), *QUICK, *words])


def rows_of(capsys):
    return json.loads(capsys.readouterr().out)["rows"]


def test_default_budgets_go_from_nothing_to_everything_with_the_same_tokens(config, capsys):
    assert budget(config, "--device", "cpu", "-o", "json") == 0
    rows = rows_of(capsys)
    assert [row["test"] for row in rows] == ["pp6", "tg3"] * 6
    offloaded = [row["offloaded_bytes"] for row in rows[::2]]
    assert offloaded[0] == 0 and offloaded == sorted(offloaded) and len(set(offloaded)) == 6
    layers_bytes = 6 * 2 * (64 * 128 + 64 * 64 + 64 * 320 + 160 * 64 + 2 * 64)
    assert offloaded[-1] == layers_bytes
    # Two repetitions: the token after the prompt, and that of each step, of which two come before the clock starts.
    assert [row["tokens"] for row in rows] == ["reference", "reference", *["2 equal", "12 equal"] * 5]
    for row in rows:
        assert row["step_s"] > 0 and len(row["samples_s"]) == 2 and not row["simulated"]
        assert row["bound_s"] is None and row["load_format"] == "dummy" and row["model"] == "tiny"
        assert row["device_bytes"] >= layers_bytes - row["offloaded_bytes"]
        assert row["bus_bytes_per_step"] == row["offloaded_bytes"]
        assert row["bus_bytes_per_s"] == pytest.approx(row["bus_bytes_per_step"] / row["step_s"])
    assert (config.parent / "picture.png").stat().st_size > 1000


def test_pasted_configs_run_after_the_baseline_and_are_never_split(config, tmp_path, capsys):
    (tmp_path / "pasted.json").write_text(PREFETCH)
    both = '{"uva": {"cpu_offload_gb": 0.0001}, "offload_backend": "uva"}'
    arms = ["--offload-config", f"@{tmp_path / 'pasted.json'}", "--offload-config", both]
    assert budget(config, *arms, "--device", "cpu", "-o", "json", "-p", "0") == 0
    rows = rows_of(capsys)
    assert [(row["backend"], row["test"]) for row in rows] == [("none", "tg3"), ("prefetch", "tg3"), ("uva", "tg3")]
    assert json.loads(rows[1]["config"]) == json.loads(PREFETCH) and json.loads(rows[2]["config"]) == json.loads(both)
    assert rows[1]["slot_bytes"] > 0


def test_budgets_and_batches_are_lists_and_ranges(config, capsys):
    words = ["--cpu-offload-gb", "0,0.0001-0.0003+0.0001", "-b", "1,3", "-n", "2-4+2", "-p", "0", "--device", "cpu"]
    assert budget(config, *words, "-o", "jsonl") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["batch"], row["test"]) for row in rows] == [(1, "tg2"), (1, "tg4"), (3, "tg2"), (3, "tg4")] * 4
    assert all(row["tokens_per_s"] == pytest.approx(row["batch"] / row["step_s"]) for row in rows)


def test_the_run_without_offload_comes_first_though_not_asked_for(config, capsys):
    words = ["--cpu-offload-gb", "0.0002,0", "--offload-config", PREFETCH, "--device", "cpu", "-p", "0", "-o", "json"]
    assert budget(config, *words) == 0
    assert [row["backend"] for row in rows_of(capsys)] == ["none", "uva", "prefetch"]


def test_equal_memory_adds_the_budget_that_frees_the_same(config, capsys):
    words = ["--offload-config", PREFETCH, "--equal-memory", "--device", "cpu", "-p", "0", "-o", "json"]
    assert budget(config, *words) == 0
    _, prefetch, uva = rows_of(capsys)
    staging_bytes = 2 * 64 * 2
    assert uva["backend"] == "uva" and uva["device_bytes"] - staging_bytes <= prefetch["device_bytes"]
    assert uva["offloaded_bytes"] < prefetch["offloaded_bytes"]


def test_what_does_not_fit_is_a_row_and_the_sweep_goes_on(config, tmp_path, capsys):
    small = json.loads(dump_profile(load_profile("h200-pcie5")))
    small["numbers"]["memory_bytes"]["value"] = 500_000
    (tmp_path / "small.json").write_text(json.dumps(small))
    words = ["--device", f"virtual:{tmp_path / 'small.json'}", "--cpu-offload-gb", "0,0.0004", "-p", "0"]
    assert budget(config, *words, "-o", "json") == 0
    refused, done = rows_of(capsys)
    assert refused["note"] == "does not fit: needs 0.000543 GiB, has 0.000466 GiB" and refused["test"] == "load"
    assert refused["step_s"] is None and refused["samples_s"] == []
    assert done["step_s"] > 0 and done["tokens"] == "reference"


def test_simulated_times_are_called_so_with_profile_and_bound(config, capsys, monkeypatch):
    monkeypatch.chdir(config.parent)
    words = ["--model-config", config.name, *QUICK, "--device", "virtual:h200-pcie5", "--offload-config", PREFETCH]
    assert main(["budget", *words, "--save", "kept.json"]) == 0
    captured = capsys.readouterr()
    title, *rest = captured.out.splitlines()
    assert title == "# tiny, simulated on h200-pcie5"
    assert any(line.startswith("Times are simulated, at the rates of H200") for line in rest)
    assert "bound ms" in captured.out and "of bound" in captured.out
    assert Path("budget-tiny-simulated-h200-pcie5.png").is_file()
    kept = json.loads(Path("kept.json").read_text())
    assert kept["title"] == "tiny, simulated on h200-pcie5" and "all equal" in kept["tokens"]
    for row in kept["rows"]:
        assert row["simulated"] and row["bound_s"] <= row["step_s"]
        assert row["step_s"] == pytest.approx(row["bound_s"] + row["idle_s"])
        assert row["share_of_bound"] == pytest.approx(row["bound_s"] / row["step_s"])


def test_meta_needs_no_weights_and_compares_no_tokens(config, capsys):
    words = ["--load-format", "meta", "--device", "virtual:h200-pcie5", "--offload-config", PREFETCH, "-o", "json"]
    assert budget(config, *words) == 0
    rows = rows_of(capsys)
    assert all(row["step_s"] > 0 and row["tokens"] == "" and row["load_format"] == "meta" for row in rows)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--cpu-offload-gb", "-1"], 2, "uva.cpu_offload_gb: Input should be greater than or equal to 0 (got -1"),
        (["--cpu-offload-gb", "0-1"], 2, "'0-1' needs a step: first-last+step"),
        (["--offload-config", '{"prefetch": {"offload_group_size": 99}}'], 2, "nothing would be offloaded"),
        (["--load-format", "meta"], 2, "add --device virtual:NAME"),
        (["--device", "virtual:none-such"], 3, "none-such"),
        (["--profile", "h200-pcie5"], 2, "--profile gives the bound of a real GPU, and this is cpu"),
        (["--device", "virtual"], 2, "names no GPU: use virtual:NAME, or add --profile FILE"),
        (["--device", "virtual:gh200", "--profile", "gh200"], 2, "give --device virtual"),
        (["-p", "0", "-n", "0"], 2, "leave nothing to measure"),
        (["-r", "0"], 2, "'0' is not a whole number of at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(config, capsys, words, code, line):
    device = [] if "--device" in words else ["--device", "cpu"]
    # As jsonl, so that a row that was measured first would be seen.
    assert budget(config, *device, *words, "-o", "jsonl") == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("offload: fatal: ") and line in captured.err
    assert captured.err.count("\n") == 1 and not (config.parent / "picture.png").exists()


def test_ctrl_c_keeps_the_rows_that_are_done(config):
    """A real SIGINT, sent when the first row has been read, while the second of very many is measured."""
    picture = config.parent / "interrupted.png"
    words = ["--model-config", str(config), "--device", "cpu", "-p", "0", "-n", "2,200", "-r", "20"]
    command = [sys.executable, "-m", "bench", "budget", *words, "-o", "jsonl", "--plot", str(picture)]
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=config.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background ignores SIGINT, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        first = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert first["test"] == "tg2" and rest == ""
    assert "interrupted: 1 of 12 rows are done and kept" in errors and "Traceback" not in errors
    assert picture.stat().st_size > 1000


def test_a_profile_is_the_virtual_gpu_where_no_other_is_named(config, capsys):
    words = ["--model-config", str(config), "--load-format", "meta", "-p", "0", "-n", "1", "-o", "json"]
    picture = ["--plot", str(config.parent / "picture.png")]
    rows = {}
    for device in (["--device", "virtual", "--profile", "gh200"], ["--device", "virtual:gh200"]):
        assert main(["budget", *words, *device, *picture]) == 0
        rows[len(device)] = json.loads(capsys.readouterr().out)["rows"]
    assert rows[4] == rows[2] and rows[4][0]["device"] == "virtual:gh200"
