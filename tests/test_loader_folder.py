"""What is said about a path that is no model folder, and about a `config.json` that cannot be used."""

import re

import pytest

from offload.errors import ModelLoadError
from offload.folder import model_folder, read_config


def refusal(call, *args) -> str:
    with pytest.raises(ModelLoadError) as caught:
        call(*args)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_folder_is_itself(tmp_path):
    assert model_folder(str(tmp_path)) == tmp_path


def test_a_hub_id_is_answered_with_the_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(model_folder, "Qwen/Qwen3-0.6B") == (
        '"Qwen/Qwen3-0.6B" is no folder; if it names a model on the Hugging Face hub, download it first: '
        'hf download "Qwen/Qwen3-0.6B" --local-dir "Qwen3-0.6B", and give that folder'
    )


@pytest.mark.parametrize("path", ["nowhere", "/no/such/folder", "a/b/c", "x\ny/z", "~no-such-user/x"])
def test_another_path_is_just_missing(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    assert refusal(model_folder, path).endswith("is no folder: give the one that holds config.json")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    text = refusal(model_folder, tmp_path / "model.safetensors")
    assert text.endswith("is a file: give the folder that holds config.json")


def test_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    assert read_config(tmp_path) == {"architectures": ["X"]}


def test_config_is_missing(tmp_path):
    text = refusal(read_config, tmp_path)
    assert text.endswith("has no config.json: give a folder in the layout of Hugging Face")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b'{"a": 1}}', b"[" * 100_000])
def test_config_is_no_json(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    assert re.fullmatch(r"config.json is not valid JSON \(.*\): download it again", refusal(read_config, tmp_path))


@pytest.mark.parametrize(("content", "shown"), [("[1]", "[1]"), ("null", "null"), ('"x"', '"x"')])
def test_config_is_no_object(tmp_path, content, shown):
    (tmp_path / "config.json").write_text(content)
    assert refusal(read_config, tmp_path) == f"config.json holds {shown}, not a JSON object: download it again"


def test_config_is_a_folder(tmp_path):
    (tmp_path / "config.json").mkdir()
    assert refusal(read_config, tmp_path).startswith("config.json cannot be read (Is a directory): ")
