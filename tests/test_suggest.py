"""Bytes over the bus per token, and the selector or step that would be better."""

import pytest

from offload.config import OffloadConfig
from offload.plan import ParameterSpec, plan
from offload.suggest import bus_bytes_per_token, routed_experts, suggestions

MIB = 2**20
DENSE = {"norm.weight": 100, "self_attn.qkv_proj.weight": 3 * MIB, "mlp.down_proj.weight": 5 * MIB}
MOE = {
    "norm.weight": 100,
    "self_attn.qkv_proj.weight": 3 * MIB,
    "mlp.gate.weight": 1000,
    "mlp.experts.w13_weight": 64 * MIB,
    "mlp.experts.w2_weight": 32 * MIB,
}


def model(layers, sizes_bytes):
    inside = [ParameterSpec(f"layers.{i}.{n}", i, size) for i in range(layers) for n, size in sizes_bytes.items()]
    return [ParameterSpec("embed.weight", None, MIB), *inside]


def uva(nbytes, *selectors):
    return OffloadConfig.of({"uva": {"cpu_offload_gb": nbytes / 2**30, "cpu_offload_params": list(selectors)}})


def prefetch(group, count, step):
    fields = {"offload_group_size": group, "offload_num_in_group": count, "offload_prefetch_step": step}
    return OffloadConfig.of({"prefetch": fields})


def bus_bytes(parameters, config, experts=None):
    return bus_bytes_per_token(plan(parameters, config), parameters, experts)


def suggested(parameters, config, experts=None):
    return suggestions(plan(parameters, config), parameters, config, experts)


def test_no_offload_no_traffic():
    assert bus_bytes(model(2, DENSE), OffloadConfig()) == 0
    assert suggested(model(2, DENSE), OffloadConfig()) == []


def test_uva_reads_what_is_on_the_host_once_per_use():
    assert bus_bytes(model(2, DENSE), uva(1, "norm")) == 100
    shared = [ParameterSpec("layers.0.w", 0, 10, 1), ParameterSpec("layers.1.w", 1, 10, 1)]
    assert bus_bytes(shared, uva(1)) == 20


def test_uva_reads_only_the_routed_experts():
    parameters = model(1, MOE)
    everything = sum(MOE.values())
    assert bus_bytes(parameters, uva(10**12)) == everything
    assert bus_bytes(parameters, uva(10**12), (8, 128)) == everything - 96 * MIB + 96 * MIB * 8 // 128


@pytest.mark.parametrize(("step", "copied"), [(1, 3), (2, 2), (3, 0), (9, 0)])
def test_prefetch_copies_whole_layers_but_never_a_slots_only_owner(step, copied):
    parameters = model(9, MOE)
    layer_bytes = 128 + 3 * MIB + 1024 + 96 * MIB
    assert bus_bytes(parameters, prefetch(3, 1, step), (8, 128)) == copied * layer_bytes


def test_experts_are_suggested_where_attention_would_be_read_by_every_token():
    parameters, config = model(8, MOE), uva(300 * MIB)
    (better,) = suggested(parameters, config, (8, 128))
    assert better.config.uva.cpu_offload_params == {"mlp.experts"}
    assert better.config.uva.cpu_offload_gb == config.uva.cpu_offload_gb
    assert better.bus_bytes_per_token < 0.9 * bus_bytes(parameters, config, (8, 128))
    assert better.freed_bytes >= 300 * MIB
    assert better.bus_bytes_per_token == bus_bytes(parameters, better.config, (8, 128))
    assert 'cpu_offload_params ["mlp.experts"]' in better.text and "\n" not in better.text


@pytest.mark.parametrize(
    ("parameters", "config", "experts"),
    [
        (model(8, DENSE), uva(20 * MIB), None),
        (model(8, DENSE), uva(1), None),
        (model(8, MOE), uva(1), (8, 128)),
        (model(8, MOE), uva(300 * MIB, "experts"), (8, 128)),
        (model(8, MOE), uva(10**12), (8, 128)),
        (model(8, MOE), uva(1, "absent"), (8, 128)),
        (model(9, DENSE), prefetch(3, 1, 1), None),
        (model(7, DENSE), prefetch(8, 2, 1), None),
        (model(2, DENSE), prefetch(1, 1, 1), None),
        (model(5, DENSE), prefetch(9, 1, 1), None),
    ],
    ids=[
        "dense",
        "one-byte",
        "cheaper-per-byte-only",
        "already",
        "everything",
        "refused",
        "no-stall",
        "one-layer",
        "no-step-helps",
        "empty",
    ],
)
def test_nothing_is_suggested_where_nothing_is_better(parameters, config, experts):
    assert suggested(parameters, config, experts) == []


def test_a_larger_step_is_suggested_where_layers_stall():
    (better,) = suggested(model(24, DENSE), prefetch(8, 2, 1))
    assert better.config.prefetch.offload_prefetch_step == 2
    assert plan(model(24, DENSE), better.config).stalling_layers == ()


@pytest.mark.parametrize(("layers", "group", "step"), [(4, 1, 2), (3, 1, 1), (8, 2, 1)])
def test_a_smaller_step_is_suggested_where_nothing_is_freed(layers, group, step):
    parameters = model(layers, DENSE)
    (better,) = suggested(parameters, prefetch(group, 1, 99))
    assert better.config.prefetch.offload_prefetch_step == step
    assert better.freed_bytes > 0 >= plan(parameters, prefetch(group, 1, 99)).freed_bytes


@pytest.mark.parametrize(
    ("model_config", "expected"),
    [
        ({"num_experts_per_tok": 8, "num_experts": 128}, (8, 128)),
        ({"num_experts_per_tok": 2, "num_local_experts": 8}, (2, 8)),
        ({"num_experts": 128}, None),
        ({"num_experts_per_tok": None, "num_experts": 128}, None),
        ({}, None),
    ],
)
def test_routed_experts_of_a_model(model_config, expected):
    assert routed_experts(model_config) == expected
