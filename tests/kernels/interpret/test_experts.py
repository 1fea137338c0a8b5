"""The experts in the interpreter: right, only what is routed is read, each byte once, and one operator from outside."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from offload_kernels import check_routing, expert_ops, fused_experts, grouped_linear
from tests.kernels import yardstick
from tests.kernels.experts_reference import assert_accurate, exact, random_layer
from tests.kernels.interpret.counting import LoadCounter, guarded

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = {  # T, E, H, I, k; interpreted tiles hold 16 tokens
    "decode": (1, 8, 128, 64, 2),
    "few": (7, 5, 130, 70, 3),
    "tile": (16, 4, 64, 128, 2),
    "ring": (40, 3, 131, 67, 2),
    "all-experts": (33, 4, 65, 33, 4),
    "one-expert": (21, 1, 72, 40, 1),
    "narrow": (50, 3, 20, 12, 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule", [None, "grouped"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_accuracy(shape, schedule, dtype):
    layer = random_layer(*shape, dtype)
    assert_accurate(fused_experts(*layer.arguments(), schedule=schedule), layer)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_active_experts_are_read_once_and_idle_ones_never(shape):
    layer = random_layer(*shape, torch.float32)
    layer = replace(layer, w13=guarded(layer.w13), w2=guarded(layer.w2))
    idle = torch.ones(shape[1], dtype=torch.bool)
    idle[layer.topk_ids.unique()] = False
    with LoadCounter() as counter:
        watched = [counter.watch(layer.w13), counter.watch(layer.w2)]
        y = fused_experts(*layer.arguments(), schedule="grouped")
    for weight in watched:
        weight.assert_each_element_loaded_once_by_one_program(never=idle.numpy())
    assert_accurate(y, layer)


def test_all_tokens_on_one_expert_of_many():
    layer = random_layer(50, 6, 48, 40, 1, torch.float32)
    layer.topk_ids.fill_(4)
    layer = replace(layer, w13=guarded(layer.w13), w2=guarded(layer.w2))
    idle = torch.arange(6) != 4
    with LoadCounter() as counter:
        watched = [counter.watch(layer.w13), counter.watch(layer.w2)]
        y = fused_experts(*layer.arguments(), schedule="grouped")
    for weight in watched:
        weight.assert_each_element_loaded_once_by_one_program(never=idle.numpy())
    assert_accurate(y, layer)


@pytest.mark.parametrize("schedule", [None, "grouped"])
def test_same_bits_on_two_runs_and_wherever_the_weights_lie(schedule):
    layer = random_layer(20, 5, 130, 70, 3, torch.bfloat16)
    moved = replace(layer, w13=layer.w13.clone(), w2=layer.w2.clone())
    first, second = (fused_experts(*each.arguments(), schedule=schedule) for each in (layer, moved))
    assert torch.equal(first, second)


@pytest.mark.parametrize("schedule", [None, "grouped"])
def test_ids_and_weights_of_the_other_dtypes(schedule):
    layer = random_layer(5, 4, 64, 32, 2, torch.bfloat16)
    layer = replace(layer, topk_ids=layer.topk_ids.int(), topk_weights=layer.topk_weights.bfloat16())
    assert_accurate(fused_experts(*layer.arguments(), schedule=schedule), layer)


@pytest.mark.parametrize("schedule", [None, "grouped"])
def test_x_may_have_any_strides(schedule):
    layer = random_layer(5, 4, 66, 32, 2, torch.float32)
    layer = replace(layer, x=layer.x.t().contiguous().t(), topk_ids=layer.topk_ids.t().contiguous().t())
    assert_accurate(fused_experts(*layer.arguments(), schedule=schedule), layer)


@pytest.mark.parametrize("schedule", [None, "grouped"])
def test_one_column_has_no_stride(schedule):
    layer = random_layer(5, 4, 64, 1, 2, torch.float32)
    layer = replace(layer, w2=layer.w2[..., 0].unsqueeze(1).mT)
    assert layer.w2.stride(-1) == 64
    assert_accurate(fused_experts(*layer.arguments(), schedule=schedule), layer)


@pytest.mark.parametrize("schedule", [None, "grouped"])
def test_an_expert_twice_in_one_token_counts_twice(schedule):
    layer = random_layer(16, 4, 64, 32, 2, torch.float32)
    layer.topk_ids[:] = 3
    assert_accurate(fused_experts(*layer.arguments(), schedule=schedule), layer)


@pytest.mark.parametrize("T", [6, 40])
def test_pairs_out_of_range_add_nothing_where_ids_are_not_checked(T):
    layer = random_layer(T, 4, 64, 32, 3, torch.float32)
    layer.topk_ids[1] = torch.tensor([-1, 4, 2])
    layer.topk_ids[3] = torch.tensor([2**40, -7, 99])
    layer.topk_weights[3] = float("nan")
    y = expert_ops.experts_by_kernel(*layer.arguments())
    assert not y[3].any()
    layer.topk_weights[3] = 0
    assert_accurate(y, layer)


@pytest.mark.parametrize("schedule", [None, "grouped"])
@pytest.mark.parametrize("wrong", [-1, 4])
def test_ids_out_of_range_are_refused_on_the_cpu(schedule, wrong):
    layer = random_layer(6, 4, 64, 32, 3, torch.float32)
    layer.topk_ids[2, 1] = wrong
    with pytest.raises(ValueError, match=rf"1 of 18 expert ids are outside 0..3, such as \[{wrong}\]"):
        fused_experts(*layer.arguments(), schedule=schedule)
    with pytest.raises(ValueError, match="1 of 18 expert ids"):
        check_routing(layer.topk_ids, 4)


@pytest.mark.parametrize("schedule", [None, "grouped"])
def test_nothing_to_do(schedule):
    layer = random_layer(0, 4, 64, 32, 2, torch.float32)
    assert fused_experts(*layer.arguments(), schedule=schedule).shape == (0, 64)
    layer = random_layer(3, 4, 64, 32, 0, torch.float32)
    assert not fused_experts(*layer.arguments(), schedule=schedule).any()


@pytest.mark.parametrize("schedule", [None, "grouped"])
@pytest.mark.parametrize("shape", [(3, 4, 64, 0, 2), (3, 4, 0, 32, 2), (3, 0, 64, 32, 0)], ids=["I", "H", "E"])
def test_a_size_of_zero(shape, schedule):
    y = fused_experts(*random_layer(*shape, torch.float32).arguments(), schedule=schedule)
    assert y.shape == (3, shape[2]) and not y.any()


@pytest.mark.parametrize("schedule", [None, "grouped"])
@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 0, 4), (2, 5, 0)], ids=["E", "N", "K"])
def test_grouped_linear_with_a_size_of_zero(shape, schedule):
    E, N, K = shape
    y = grouped_linear(torch.randn(3, K), torch.randn(shape), torch.arange(E + 1), schedule=schedule)
    assert y.shape == (3, N) and not y.any()


@pytest.mark.parametrize("schedule", [None, "grouped"])
@pytest.mark.parametrize("ends", [[0, 2, 5], [3, 1, 4], [-1, 1, 4]], ids=["beyond", "decreasing", "negative"])
def test_offsets_out_of_order_are_refused_on_the_cpu(ends, schedule):
    with pytest.raises(ValueError, match=r"offsets \[.*\] do not rise from 0 or more to at most 4, the rows of x"):
        grouped_linear(torch.randn(4, 8), torch.randn(2, 5, 8), torch.tensor(ends), schedule=schedule)


def test_offsets_out_of_range_touch_nothing_else_where_they_are_not_checked():
    x, weight = torch.randn(4, 8), torch.randn(2, 5, 8)
    y = expert_ops.grouped_by_kernel(x, weight, torch.tensor([-7, 1, 1 << 40]))
    torch.testing.assert_close(y, torch.cat([x[:1] @ weight[0].t(), x[1:] @ weight[1].t()]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule", [None, "grouped"])
@pytest.mark.parametrize("ends", [[0, 3, 3, 10], [0, 0, 40, 41], [2, 5, 9, 9]], ids=["few", "ring", "gaps"])
def test_grouped_linear(ends, schedule, dtype):
    x, weight = torch.randn(43, 70, dtype=dtype), torch.randn(3, 66, 70, dtype=dtype)
    y = grouped_linear(x, weight, torch.tensor(ends), schedule=schedule)
    covered = torch.zeros(43, dtype=torch.bool)
    for group, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
        covered[first:last] = True
        if first < last:
            yardstick.assert_accurate(y[first:last], x[first:last], weight[group])
    assert not y[~covered].any()


class Operators(TorchDispatchMode):
    """Remembers the operators that arrive."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_one_operator():
    layer = random_layer(5, 4, 64, 32, 2, torch.float32)
    with Operators() as operators:
        fused_experts(*layer.arguments())
    assert operators.seen == ["offload.fused_experts.default"]


def test_meta_tensors_have_shapes_only():
    layer = random_layer(5, 4, 64, 32, 2, torch.bfloat16)
    y = fused_experts(*(each.to("meta") for each in layer.arguments()))
    assert y.is_meta and y.shape == (5, 64) and y.dtype == torch.bfloat16


def test_opcheck():
    layer = random_layer(5, 4, 64, 32, 2, torch.float32)
    torch.library.opcheck(torch.ops.offload.fused_experts.default, layer.arguments())
    arguments = (torch.randn(6, 8), torch.randn(2, 5, 8), torch.tensor([0, 2, 6]))
    torch.library.opcheck(torch.ops.offload.grouped_linear.default, arguments)


def test_compiles_without_a_graph_break():
    layer = random_layer(5, 4, 64, 32, 2, torch.float32)
    compiled = torch.compile(lambda *arguments: fused_experts(*arguments) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*layer.arguments()), 2 * fused_experts(*layer.arguments()))


MISTAKES = {
    "schedule": (lambda layer: {"schedule": "skinny"}, "schedule 'skinny' is unknown: use grouped, or None"),
    "odd": (lambda layer: {"w13": layer.w13[:, 1:]}, r"w13 \(4, 63, 64\)"),
    "w2": (lambda layer: {"w2": layer.w2[:, :-1]}, r"w2 \(4, 63, 32\)"),
    "hidden": (lambda layer: {"x": layer.x[:, 1:]}, r"x \(5, 63\)"),
    "dtype": (lambda layer: {"w2": layer.w2.half()}, "w2 is torch.float16 but x torch.float32: convert"),
    "integer": (lambda layer: {"x": layer.x.int()}, "x is torch.int32"),
    "ids": (lambda layer: {"topk_ids": layer.topk_ids.short()}, "topk_ids are int32 or int64"),
    "pairs": (lambda layer: {"topk_weights": layer.topk_weights[:, :1]}, r"topk_weights \(5, 1\)"),
    "stride": (lambda layer: {"w2": layer.w2.mT.contiguous().mT}, "last dimension must be contiguous"),
    "device": (lambda layer: {"w2": layer.w2.to("meta")}, "x is on cpu and w2 on meta"),
    "grad": (lambda layer: {"x": layer.x.requires_grad_()}, "no backward"),
}


@pytest.mark.parametrize("change, told", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told(change, told):
    layer = random_layer(5, 4, 64, 32, 2, torch.float32)
    arguments = dict(zip(("x", "w13", "w2", "topk_ids", "topk_weights"), layer.arguments(), strict=True))
    with pytest.raises(ValueError, match=told):
        fused_experts(**arguments | change(layer))


def test_the_reference_is_the_layer_that_models_write():
    layer = random_layer(4, 3, 16, 8, 2, torch.float64)
    out = torch.zeros(4, 16, dtype=torch.float64)
    for expert in range(3):
        tokens, slots = (layer.topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(layer.x[tokens], layer.w13[expert]).chunk(2, dim=-1)
        part = F.linear(F.silu(gate) * up, layer.w2[expert])
        out[tokens] += part * layer.topk_weights[tokens, slots, None]
    torch.testing.assert_close(exact(layer), out)
