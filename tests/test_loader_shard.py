"""One safetensors file: what is where, and every way in which its header can be damaged."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

from offload.errors import ModelLoadError
from offload.shard import cut, read_shard

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "c": torch.zeros(2, 2, dtype=torch.int8),
}
WHOLE = save(TENSORS, metadata={"format": "pt"})
HEADER_BYTES = int.from_bytes(WHOLE[:8], "little")
HEADER = json.loads(WHOLE[8 : 8 + HEADER_BYTES])


def refusal(path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_shard(path, path.name)
    text = str(caught.value)
    assert "\n" not in text
    return text


def written(path, header: object, data: bytes = WHOLE[8 + HEADER_BYTES :]):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


def test_every_tensor_is_where_the_header_says(path):
    save_file(TENSORS, path)
    found = read_shard(path, "x.safetensors")
    assert found.keys() == TENSORS.keys()
    content = path.read_bytes()
    for name, tensor in TENSORS.items():
        entry = found[name]
        assert entry.shape == tuple(tensor.shape) and entry.nbytes == tensor.nbytes
        raw = content[entry.offset_bytes : entry.offset_bytes + entry.nbytes]
        assert raw == bytes(tensor.contiguous().view(torch.uint8).flatten().tolist() if tensor.numel() else b"")
    assert found["a.weight"].dtype == torch.float32 and found["b"].dtype == torch.bfloat16
    assert found["c"].dtype is None and found["c"].dtype_name == "I8"


def test_a_missing_file(path):
    assert refusal(path) == "missing shard x.safetensors: download it again"


def test_a_folder_in_place_of_a_file(path):
    path.mkdir()
    assert refusal(path) == "x.safetensors cannot be read (Is a directory): check its permissions"


@pytest.mark.parametrize("size", [0, 1, 7])
def test_no_room_for_the_length_of_the_header(path, size):
    path.write_bytes(WHOLE[:size])
    assert refusal(path) == f"x.safetensors is truncated: it has {size} bytes: download it again"


@pytest.mark.parametrize("size", [8, 20, 7 + HEADER_BYTES])
def test_no_room_for_the_header(path, size):
    path.write_bytes(WHOLE[:size])
    assert refusal(path) == (
        f"x.safetensors is truncated or no safetensors file: its header ends at byte {8 + HEADER_BYTES} of {size}: "
        "download it again"
    )


def test_a_header_of_absurd_length_is_not_read(path):
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    with open(path, "r+b") as file:
        file.truncate(200_000_000)
    assert "is truncated or no safetensors file: its header ends at byte 100000009 of 200000000" in refusal(path)


def test_a_pointer_of_git_lfs(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    assert refusal(path) == "x.safetensors is a Git LFS pointer, not the weights: run git lfs pull"


@pytest.mark.parametrize("missing", [1, 60])
def test_a_truncated_file_names_the_first_tensor_that_is_cut(path, missing):
    path.write_bytes(WHOLE[:-missing])
    room = len(WHOLE) - missing - 8 - HEADER_BYTES
    end, name = min(
        (each["data_offsets"][1], name)
        for name, each in HEADER.items()
        if name != "__metadata__" and each["data_offsets"][1] > room
    )
    assert refusal(path) == (
        f'x.safetensors is truncated: tensor "{name}" ends {end - room} bytes after the file: download it again'
    )


def test_bytes_after_the_last_tensor(path):
    path.write_bytes(WHOLE + b"more")
    assert refusal(path).startswith("x.safetensors: its header is damaged (")


def changed(**entry) -> dict:
    return {**HEADER, "a.weight": {**HEADER["a.weight"], **entry}}


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[" * 50_000,
        [],
        {"a.weight": 3},
        changed(dtype="F99"),
        changed(shape=[3, 5]),
        changed(shape=[-3, -4]),
        changed(shape="wide"),
        changed(data_offsets=[0]),
        changed(data_offsets=[4, 0]),
        changed(data_offsets=["0", "48"]),
        changed(data_offsets=[0, 4]),
        changed(data_offsets=[True, 48]),
        {name: value for name, value in HEADER.items() if name != "b"},
    ],
    ids=repr,
)
def test_a_damaged_header(path, header):
    text = refusal(written(path, header))
    assert text.startswith("x.safetensors: its header is damaged (") and text.endswith("): download it again")


def test_names_in_messages_are_on_one_line_and_cut():
    assert cut("a\nb") == "a\\nb"
    assert len(cut("x" * 300)) <= 80


@given(st.data())
def test_no_damage_is_fatal_and_what_is_accepted_lies_in_the_file(tmp_path_factory, data):
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 8 + HEADER_BYTES - 1))
        content[place] = data.draw(st.sampled_from(sorted(b'\x00\xff0123456789,:[]{}"ae. F') + [content[place] ^ 1]))
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        found = read_shard(path, "x.safetensors")
    except ModelLoadError as error:
        assert "\n" not in str(error) and str(error).startswith("x.safetensors")
        return
    size = path.stat().st_size
    with safe_open(path, framework="pt") as reference:
        assert found.keys() == set(reference.keys())
        for name, entry in found.items():
            assert 0 <= entry.offset_bytes and entry.offset_bytes + entry.nbytes <= size
            assert list(entry.shape) == reference.get_slice(name).get_shape()
            assert entry.dtype_name == reference.get_slice(name).get_dtype()
