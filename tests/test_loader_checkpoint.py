"""Which tensors a folder has, and what is refused before memory is reserved; all with real safetensors files."""

import json

import pytest
import torch
from safetensors.torch import save_file

from offload.checkpoint import INDEX, open_checkpoint
from offload.errors import ModelLoadError
from tests.small_checkpoint import SmallModel, checkpoint_tensors, split, write_folder

REMEDY = ": use the config.json and the files of one checkpoint"


def check(folder) -> None:
    open_checkpoint(folder).check(SmallModel())


def refusal(folder) -> str:
    with pytest.raises(ModelLoadError) as caught:
        check(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def with_index(folder, weight_map: object):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("index", [False, True], ids=["no-index", "index"])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_all_shards_are_found(tmp_path, shards, index):
    write_folder(tmp_path, *split(checkpoint_tensors(), shards), index=index)
    check(tmp_path)
    assert open_checkpoint(tmp_path).entries.keys() == checkpoint_tensors().keys()


def test_files_of_any_name_without_an_index(tmp_path):
    first, second = split(checkpoint_tensors(), 2)
    save_file(first, tmp_path / "first.safetensors")
    save_file(second, tmp_path / "second.safetensors")
    check(tmp_path)


def test_a_linked_shard_is_followed_as_in_the_hubs_cache(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(checkpoint_tensors(), tmp_path / "blobs" / "0a1b")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0a1b")
    with_index(tmp_path / "snapshot", dict.fromkeys(checkpoint_tensors(), "model.safetensors"))
    check(tmp_path / "snapshot")


def test_the_second_copy_in_mistrals_own_layout_is_left_alone(tmp_path):
    write_folder(tmp_path, checkpoint_tensors())
    save_file({"other.name": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    check(tmp_path)


def test_tied_and_computed_tensors_are_skipped(tmp_path):
    extra = {"lm_head.weight": torch.ones(2, 2), "layers.0.rotary_emb.inv_freq": torch.ones(4)}
    check(write_folder(tmp_path, checkpoint_tensors() | extra))


def test_an_empty_folder(tmp_path):
    assert refusal(tmp_path).endswith("has no .safetensors file: download the weights, or use load_format dummy")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_only(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    text = refusal(tmp_path)
    assert f'holds its weights as pickle only ("{name}"), which can run code when it is read' in text
    assert text.endswith("convert it with transformers, from_pretrained(...).save_pretrained(...)")


def test_a_missing_shard_that_the_index_names(tmp_path):
    write_folder(tmp_path, *split(checkpoint_tensors(), 3), index=True)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert refusal(tmp_path) == "missing shard model-00002-of-00003.safetensors: download it again"


def test_a_missing_shard_that_the_numbers_show(tmp_path):
    write_folder(tmp_path, *split(checkpoint_tensors(), 3))
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    assert refusal(tmp_path) == "missing shard model-00003-of-00003.safetensors: download it again"


def test_a_truncated_shard_of_several(tmp_path):
    write_folder(tmp_path, *split(checkpoint_tensors(), 2), index=True)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    text = refusal(tmp_path)
    assert text.startswith('model-00002-of-00002.safetensors is truncated: tensor "layers.')
    assert text.endswith(" ends 1 bytes after the file: download it again")


def test_a_missing_tensor(tmp_path):
    tensors = checkpoint_tensors()
    del tensors["layers.1.gate.weight"]
    assert refusal(write_folder(tmp_path, tensors)) == (
        'missing tensor "layers.1.gate.weight" (looked in "model.safetensors")' + REMEDY
    )


def test_an_unexpected_tensor(tmp_path):
    tensors = checkpoint_tensors() | {"layers.0.up.bias": torch.ones(5)}
    assert (
        refusal(write_folder(tmp_path, tensors)) == 'model.safetensors: unexpected tensor "layers.0.up.bias"' + REMEDY
    )


def test_a_wrong_shape_is_shown_beside_the_one_that_the_config_needs(tmp_path):
    tensors = checkpoint_tensors() | {"layers.2.up.weight": torch.ones(5, 7)}
    assert refusal(write_folder(tmp_path, tensors)) == (
        'model.safetensors: tensor "layers.2.up.weight" has shape [5, 7], config.json needs [5, 6]' + REMEDY
    )


def test_a_transposed_tensor_of_the_right_size(tmp_path):
    tensors = checkpoint_tensors() | {"layers.2.up.weight": torch.ones(6, 5)}
    assert "has shape [6, 5], config.json needs [5, 6]" in refusal(write_folder(tmp_path, tensors))


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.bool, "BOOL")]
)
def test_a_wrong_dtype(tmp_path, dtype, name):
    tensors = checkpoint_tensors() | {"layers.0.norm.weight": torch.ones(6).to(dtype)}
    assert refusal(write_folder(tmp_path, tensors)) == (
        f'model.safetensors: tensor "layers.0.norm.weight" is "{name}", not a float of 16 bits or more '
        "(quantised checkpoints are not supported yet)" + REMEDY
    )


def test_several_faults_on_one_line(tmp_path):
    tensors = {name: tensor for name, tensor in checkpoint_tensors().items() if "layers.0" not in name}
    tensors |= {"x": torch.ones(1), "layers.1.up.weight": torch.ones(1), "layers.2.up.weight": torch.ones(1)}
    assert refusal(write_folder(tmp_path, tensors)) == (
        'missing tensor "layers.0.up.weight", "layers.0.gate.weight", "layers.0.norm.weight" '
        '(looked in "model.safetensors"); model.safetensors: unexpected tensor "x"; '
        'model.safetensors: tensor "layers.1.up.weight" has shape [1], config.json needs [5, 6]; and 1 more' + REMEDY
    )


def test_a_tensor_in_two_files_without_an_index(tmp_path):
    save_file(checkpoint_tensors(), tmp_path / "a.safetensors")
    save_file({"embed.weight": torch.ones(11, 6)}, tmp_path / "b.safetensors")
    assert refusal(tmp_path) == (
        f'tensor "embed.weight" is in a.safetensors and in b.safetensors, and there is no {INDEX}: '
        "remove the file that does not belong to the model"
    )


@pytest.mark.parametrize("label", ["a.safetensors", "b.safetensors"])
def test_a_tensor_in_two_files_is_taken_where_the_index_says(tmp_path, label):
    save_file(checkpoint_tensors(), tmp_path / "a.safetensors")
    save_file({"embed.weight": torch.ones(11, 6), "layers.0.norm.weight": torch.ones(6)}, tmp_path / "b.safetensors")
    places = dict.fromkeys(checkpoint_tensors(), "a.safetensors")
    with_index(tmp_path, places | {"embed.weight": label, "layers.0.norm.weight": "b.safetensors"})
    assert open_checkpoint(tmp_path).entries["embed.weight"].label == label


def test_an_index_that_promises_too_much(tmp_path):
    write_folder(tmp_path, checkpoint_tensors())
    with_index(tmp_path, dict.fromkeys([*checkpoint_tensors(), "ghost"], "model.safetensors"))
    assert refusal(tmp_path) == (f'"model.safetensors" has no tensor "ghost", but {INDEX} says so: download both again')


@pytest.mark.parametrize(
    "label",
    [
        "../outside.safetensors",
        "/etc/outside.safetensors",
        "a/../../outside.safetensors",
        "..\\x.safetensors",
        "",
        ".",
        "a\n.safetensors",
        "\0.safetensors",
    ],
    ids=repr,
)
def test_an_index_whose_paths_leave_the_folder(tmp_path, label):
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file(checkpoint_tensors(), tmp_path / "outside.safetensors")
    with_index(inside, dict.fromkeys(checkpoint_tensors(), label))
    assert refusal(inside) == f"{INDEX}: the path {json.dumps(label)} leaves the folder: do not use this checkpoint"


def test_an_index_of_pickles(tmp_path):
    with_index(tmp_path, {"embed.weight": "pytorch_model.bin"})
    assert refusal(tmp_path) == (f'{INDEX}: "pytorch_model.bin" is no .safetensors file: save the model as safetensors')


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    assert refusal(tmp_path) == f"{INDEX} has no weight_map from tensor names to file names: download it again"


def test_an_index_that_is_no_json(tmp_path):
    (tmp_path / INDEX).write_text("<html>")
    assert refusal(tmp_path).startswith(f"{INDEX} is not valid JSON (")
