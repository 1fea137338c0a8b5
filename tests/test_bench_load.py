"""The loading bench measures two loaders of the same bytes and writes a document with its circumstances."""

import json

import torch
from safetensors import safe_open

from bench import load
from bench.__main__ import main as bench
from bench.machine import GIB


def test_the_model_is_as_large_as_asked_and_no_layer_larger():
    smallest = load._nbytes(load.model_of_at_least(0))
    layer = load._nbytes(load.model_of_at_least(smallest + 1)) - smallest
    assert len(load.model_of_at_least(smallest).layers) == 1
    model = load.model_of_at_least(2 * GIB)
    assert 2 * GIB <= load._nbytes(model) < 2 * GIB + layer


def test_shards_hold_every_tensor_once_and_both_arms_read_the_same(tmp_path):
    model = load.build({**load.LAYER, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64})
    paths = load.write_checkpoint(tmp_path, model, 3)
    assert len(paths) == 3
    names = []
    for path in paths:
        with safe_open(path, framework="pt") as file:
            names += file.keys()
    assert sorted(names) == sorted(model.checkpoint_slices())
    plain = load.plain_clone(paths)()
    backend = load.our_loader(tmp_path, model)()
    for name, place in model.checkpoint_slices().items():
        target = backend.destination(place.parameter)
        target = target if place.rows is None else target[place.start : place.start + place.rows]
        assert torch.equal(plain[name], target), name


def test_tensors_are_dealt_to_shards_of_about_equal_size():
    assert load.dealt({"a": 1, "b": 5, "c": 3, "d": 3}, 2) == [["b", "a"], ["c", "d"]]


def test_ratios_are_of_medians_and_of_single_rounds():
    plain = {"load_s": 2.0, "cpu_s": 4.0, "samples_s": [2.0, 1.0, 4.0]}
    ours = {"load_s": 1.0, "cpu_s": 1.0, "samples_s": [1.0, 2.0, 1.0]}
    assert load.ratios([plain, ours]) == {"ratio": 0.5, "ratio_min": 0.25, "ratio_max": 2.0, "cpu_ratio": 0.25}


def test_the_document_has_what_makes_it_repeatable(tmp_path, monkeypatch, capsys):
    small = load.build({**load.LAYER, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64})
    monkeypatch.setattr(load, "model_of_at_least", lambda nbytes: small)
    target = tmp_path / "load.json"
    assert bench(["load", "--gib", "0.001", "--shards", "2", "-r", "2", "--save", str(target)]) == 0
    document = json.loads(target.read_text())
    assert document["command"] == "python -m bench load --gib 0.001 --shards 2 -r 2 --save load.json"
    assert {"commit", "machine", "versions", "ratio", "ratio_min", "ratio_max", "target_ratio"} <= document.keys()
    assert [row["arm"] for row in document["rows"]] == ["get_tensor().clone()", "offload.loader"]
    assert all(len(row["samples_s"]) == 2 and row["shards"] == 2 for row in document["rows"])
    printed = capsys.readouterr().out
    assert "| offload.loader |" in printed and "target at most 0.8" in printed
