"""Which parameters a selector means, and what is near one that means none."""

import pytest

from offload.selectors import layer_path, matches, nearest

LAYER = "model.layers.3"


@pytest.mark.parametrize(
    ("selector", "rest"),
    [
        ("experts", "mlp.experts.w2_weight"),
        ("experts.w2_weight", "mlp.experts.w2_weight"),
        ("w2_weight", "mlp.experts.w2_weight"),
        ("mlp.experts.w2_weight", "mlp.experts.w2_weight"),
        ("model.layers.3", "mlp.down_proj.weight"),
        ("model.layers.3.mlp", "mlp.down_proj.weight"),
        ("model.layers.3.mlp.down_proj.weight", "mlp.down_proj.weight"),
        ("layers.3", "mlp.down_proj.weight"),
        ("layers.3.mlp", "mlp.down_proj.weight"),
    ],
)
def test_matching(selector, rest):
    assert matches(selector, LAYER, rest)


@pytest.mark.parametrize(
    ("selector", "rest"),
    [
        ("expert", "mlp.experts.w2_weight"),
        ("w2", "mlp.experts.w2_weight"),
        ("mlp.w2_weight", "mlp.experts.w2_weight"),
        ("w2_weight", "mlp.experts.w2_weight_scale"),
        ("Experts", "mlp.experts.w2_weight"),
        ("experts.*", "mlp.experts.w2_weight"),
        ("", "mlp.experts.w2_weight"),
        (".", "mlp.experts.w2_weight"),
        ("mlp.", "mlp.experts.w2_weight"),
        ("model", "mlp.experts.w2_weight"),
        ("layers", "mlp.experts.w2_weight"),
        ("3", "mlp.experts.w2_weight"),
        ("3.mlp", "mlp.experts.w2_weight"),
        ("model.layers", "mlp.experts.w2_weight"),
        ("layers.33", "mlp.experts.w2_weight"),
        ("layers.3.experts", "mlp.experts.w2_weight"),
        ("layers.3.ml", "mlp.experts.w2_weight"),
        ("layers.3.", "mlp.experts.w2_weight"),
        ("model.layers.4.mlp", "mlp.experts.w2_weight"),
    ],
)
def test_not_matching(selector, rest):
    assert not matches(selector, LAYER, rest)


def test_a_path_of_one_segment_is_a_full_path():
    assert matches("3.mlp", "3", "mlp.weight") and matches("3", "3", "mlp.weight")


@pytest.mark.parametrize(
    ("names", "layer", "path"),
    [
        (["model.layers.3.a.weight", "model.layers.3.b.weight"], 3, "model.layers.3"),
        (["layers.0.weight"], 0, "layers.0"),
        (["0.weight", "0.bias"], 0, "0"),
        (["transformer.h.1.experts.1.w"], 1, "transformer.h.1"),
        (["model.layers.3.a", "model.layers.3.ab"], 3, "model.layers.3"),
        (["model.layers.17.a.w", "model.layers.17.b.w"], 1, "model.layers.17"),
        (["layers.1.blocks.0.a", "layers.1.blocks.0.b"], 5, "layers.1.blocks.0"),
        (["trunk.a", "trunk.b"], 0, ""),
        (["a.weight", "b.weight"], 0, ""),
        (["layers.3", "layers.3.w"], 3, "layers.3"),
    ],
)
def test_the_layers_path_is_read_off_its_names(names, layer, path):
    assert layer_path(names, layer) == path


@pytest.mark.parametrize(
    ("selector", "best"),
    [("expert", "experts"), ("Experts", "experts"), ("q_proj", "qkv_proj"), ("gate_proj", "gate_up_proj")],
)
def test_the_nearest_part_of_a_name(selector, best):
    rests = [
        "self_attn.qkv_proj.weight",
        "mlp.gate_up_proj.weight",
        "mlp.down_proj.weight",
        "mlp.experts.w13_weight",
    ]
    assert nearest(selector, rests)[0] == best


def test_nothing_is_near_nonsense():
    assert nearest("zzzz", ["mlp.down_proj.weight"]) == []
