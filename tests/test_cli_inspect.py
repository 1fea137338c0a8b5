"""`offload inspect`: what a configuration means, and what it would do to a model of which only headers are read."""

import json
import shutil

import pytest

from offload.cli import main
from offload.config import OffloadConfig
from offload.models import parameter_specs
from offload.plan import plan
from offload.suggest import bus_bytes_per_token
from offload.text import gib
from tests.tiny_folder import CONFIG

UVA = '{"uva": {"cpu_offload_gb": 0.00005}}'
STALLING = '{"prefetch": {"offload_group_size": 3, "offload_num_in_group": 2, "offload_params": ["mlp", "q_proj"]}}'


def inspect(capsys, config, *more):
    code = main(["inspect", "--offload-config", config, *more])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_configuration_alone(capsys):
    code, out, err = inspect(capsys, '{"prefetch": {"offload_group_size": "8"}}')
    assert (code, err) == (0, "")
    assert out.splitlines()[1:] == ["backend   prefetch (auto, offload_group_size is above 0)", "enabled   yes"]
    assert '"offload_group_size": 8' in out


def test_a_warning_goes_to_stderr(capsys):
    code, _, err = inspect(capsys, '{"uva": {"cpu_offload_gb": 1}, "prefetch": {"offload_group_size": 8}}')
    assert code == 0 and err.startswith("[offload] offload_config: Both UVA and prefetch offload fields are set")


def test_json_of_a_configuration(capsys):
    code, out, _ = inspect(capsys, '{"offload_backend": "uva", "prefetch": {"offload_group_size": 2}}', "--json")
    shown = json.loads(out)
    assert code == 0 and shown.keys() == {"resolved_backend", "enabled", "config", "warnings"}
    assert (shown["resolved_backend"], shown["enabled"]) == ("uva", False)
    assert shown["config"]["prefetch"]["offload_group_size"] == 2 and len(shown["warnings"]) == 1


@pytest.mark.parametrize("config", [UVA, STALLING, "{}"], ids=["uva", "prefetch", "none"])
def test_json_of_a_plan(capsys, tiny_folder, config):
    code, out, _ = inspect(capsys, config, "--model", str(tiny_folder), "--json")
    parameters = parameter_specs(CONFIG)
    made = plan(parameters, OffloadConfig.from_json(config))
    shown = json.loads(out)["plan"]
    assert code == 0
    for name in ("offloaded", "offloaded_layers", "refill_order", "stalling_layers", "unmatched_selectors"):
        assert shown[name] == list(getattr(made, name)), name
    for name in ("offloaded_bytes", "slots", "slot_bytes", "freed_bytes", "copies_per_pass"):
        assert shown[name] == getattr(made, name), name
    assert shown["bus_bytes_per_token"] == bus_bytes_per_token(made, parameters)
    for better in shown["suggestions"]:
        assert OffloadConfig.of(better["config"]).is_offloading_enabled()


def test_a_plan_in_text_says_everything(capsys, tiny_folder):
    code, out, err = inspect(capsys, STALLING, "--model", str(tiny_folder))
    assert code == 0
    for words in (
        "LlamaForCausalLM, 6 decoder layers",
        "slots     1 of",
        "copies    4 per pass",
        "stalls    layers 2, 5",
    ):
        assert words in out
    assert "better    offload_prefetch_step 2" in out
    assert "1-2, 4-5  0" in out and "mlp.gate_up_proj.weight, mlp.down_proj.weight" in out
    assert 'selector "q_proj" matches no parameter' in err and "always wait for their copy" in err


def test_weights_are_shown_in_the_order_they_are_taken(capsys, tiny_folder):
    _, out, _ = inspect(capsys, UVA, "--model", str(tiny_folder))
    rows = [row.split(None, 4) for row in out.split("\n\n")[1].splitlines()[1:]]
    assert [row[0] for row in rows] == ["0", "1"]
    assert rows[0][4] == "all" and rows[1][4].startswith("input_layernorm.weight, self_attn.qkv_proj.weight")


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_plan_that_offloads_nothing_is_shown_and_refused(capsys, tiny_folder, flags):
    code, out, err = inspect(
        capsys, '{"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["experts"]}}', "--model", str(tiny_folder), *flags
    )
    assert code == 2 and "offloaded" in out
    assert err.splitlines()[-1].startswith('offload: fatal: nothing would be offloaded: selector "experts"')


def test_a_model_without_a_name_is_not_no_model(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = inspect(capsys, UVA, "--model", "")
    assert (code, out) == (3, "") and "has no config.json" in err


def test_a_configuration_is_refused_before_the_folder_is_looked_for(capsys):
    code, out, err = inspect(capsys, "{]", "--model", "/no/such/folder")
    assert (code, out) == (2, "") and "Invalid JSON" in err


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the model, to be damaged."""
    return shutil.copytree(tiny_folder, tmp_path / "copy")


def test_a_truncated_file_is_refused_by_its_header(capsys, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    code, out, err = inspect(capsys, UVA, "--model", str(folder))
    assert (code, out) == (3, "") and "model.safetensors" in err


def test_only_headers_are_read(capsys, folder):
    file = folder / "model.safetensors"
    size_bytes = file.stat().st_size
    header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as opened:
        opened.truncate(header_bytes)
        opened.truncate(size_bytes)
    assert inspect(capsys, UVA, "--model", str(folder))[0] == 0


def test_a_folder_without_weights_can_be_planned_for(capsys, folder):
    (folder / "model.safetensors").unlink()
    code, out, err = inspect(capsys, UVA, "--model", str(folder))
    assert code == 0 and "offloaded" in out and "no weight files" in err


def test_pickles_are_refused(capsys, folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    code, _, err = inspect(capsys, UVA, "--model", str(folder))
    assert code == 3 and "pickle" in err


def test_dtype_changes_the_sizes(capsys, tiny_folder):
    sizes = []
    for dtype in ("float32", "bfloat16"):
        _, out, _ = inspect(capsys, UVA, "--model", str(tiny_folder), "--json", "--dtype", dtype)
        sizes.append(json.loads(out)["plan"]["offloaded_bytes"])
    assert 0.4 < sizes[1] / sizes[0] and sizes[0] != sizes[1]
    assert inspect(capsys, UVA, "--model", str(tiny_folder), "--dtype", "int8")[0] == 3


def test_a_mixture_of_experts_reads_only_routed_ones_and_is_told_so(capsys, tmp_path):
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    config = CONFIG | experts | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = inspect(capsys, '{"uva": {"cpu_offload_gb": 0.0005}}', "--model", str(tmp_path), "--json")
    shown = json.loads(out)["plan"]
    assert code == 0
    assert shown["bus_bytes_per_token"] < 0.5 * shown["offloaded_bytes"]
    (better,) = shown["suggestions"]
    assert better["config"]["uva"]["cpu_offload_params"] == ["mlp.experts"]
    assert better["bus_bytes_per_token"] < shown["bus_bytes_per_token"]
    code, out, _ = inspect(capsys, json.dumps(better["config"]), "--model", str(tmp_path), "--json")
    selected = json.loads(out)["plan"]
    assert code == 0 and selected["bus_bytes_per_token"] == better["bus_bytes_per_token"]
    assert selected["default_order_bus_bytes_per_token"] == shown["bus_bytes_per_token"]
    assert shown["default_order_bus_bytes_per_token"] is None
    _, out, _ = inspect(capsys, json.dumps(better["config"]), "--model", str(tmp_path))
    assert f"per decode token ({gib(shown['bus_bytes_per_token'])} without selectors)" in out
