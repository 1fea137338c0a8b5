"""The counters and the yardstick turn red on kernels with one fault put in."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from offload_kernels import expert_ops, tiles
from tests.kernels.experts_reference import random_layer
from tests.kernels.interpret.counting import LoadCounter, guarded
from tests.kernels.mutants import mutant
from tests.kernels.yardstick import assert_accurate, error

GUARD_ROWS = 128  # a kernel without its mask reads these, and not what lies behind the tensor


def check_dense(module, M, N, K):
    x, weight = torch.randn(M, K), guarded(torch.randn(N, K), guard_rows=GUARD_ROWS)
    out = torch.full((M, N), float("nan"))
    with LoadCounter() as counter:
        watched = counter.watch(weight)
        module.run(x, weight, None, out)
    watched.assert_each_element_loaded_once_by_one_program()
    assert_accurate(out, x, weight)


def check_experts(module):
    layer = random_layer(40, 4, 70, 40, 2, torch.float32)
    layer.topk_ids[:] = torch.tensor([3, 1])
    layer.topk_ids[:5, 1] = 0
    w13 = guarded(layer.w13, guard_rows=GUARD_ROWS)
    pairs, offsets = expert_ops.sorted_pairs(layer.topk_ids, 4)
    groups = module.Groups.of(offsets, 80, ring=True, pairs=pairs)
    hidden = torch.full((80, 40), float("nan"))
    with LoadCounter() as counter:
        watched = counter.watch(w13)
        tile = tiles.pick("gate_up", 40, 4, tiles.INTERPRETER)
        module.run(layer.x, w13, hidden, groups, tile, gather=2, gated=True)
    watched.assert_each_element_loaded_once_by_one_program(never=torch.tensor([False, False, True, False]).numpy())
    experts = layer.topk_ids.reshape(-1)[pairs]
    gate, up = torch.einsum("ph,pnh->pn", layer.x[pairs // 2].double(), w13[experts].double()).chunk(2, dim=1)
    assert error(hidden, F.silu(gate) * up) < 1e-6


CHECKS = {
    "skinny": lambda module: check_dense(module, 5, 70, 300),
    "skinny-split": lambda module: check_dense(module, 5, 30, 4370),
    "wide": lambda module: check_dense(module, 300, 300, 300),
    "grouped": check_experts,
}

MUTANTS = {
    "rows-mask": ("skinny", "[None, :], mask=mask_n[:, None], other=0.0)", "[None, :])"),
    "tail-mask": ("skinny", "mask=mask_n[:, None] & mask_k[None, :]", "mask=mask_n[:, None]"),
    "overlap": ("skinny", "task // splits * BLOCK_N", "task // splits * (BLOCK_N - 1)"),
    "step-twice": ("skinny-split", "tl.range(first, ", "tl.range(tl.maximum(first - 1, 0), "),
    "split-missed": ("skinny-split", "for split in range(splits)", "for split in range(1, splits)"),
    "ring-ignored": ("wide", "accumulate(acc, slot_rows, x_rows, every_lane", "accumulate(acc, w_rows, x_rows, mask_n"),
    "programs-overlap": ("wide", "first_row + rows_per_program, N)", "first_row + rows_per_program + 1, N)"),
    "shift-forgotten": ("wide", "mask_n = (offs_n >= first_row) & (offs_n < end_row)", "mask_n = offs_n < end_row"),
    "second-tile-twice": ("grouped", "if last - first > BLOCK_M:", "if last - first > 4 * BLOCK_M:"),
    "idle-read": (
        "grouped",
        "for start in range(first, last, BLOCK_M)",
        "for start in range(first, tl.maximum(last, first + 1), BLOCK_M)",
    ),
    "row-missed": ("grouped", "mask_m = offs_m < last", "mask_m = offs_m < last - 1"),
    "up-is-gate": ("grouped", "up_ptr + k + w_offs", "w_ptr + k + w_offs"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_as_they_are_pass(name):
    CHECKS[name](importlib.import_module(f"offload_kernels.{name.removesuffix('-split')}"))


@pytest.mark.parametrize("name, old, new", MUTANTS.values(), ids=MUTANTS)
def test_a_fault_put_in_is_found(name, old, new, tmp_path):
    broken = mutant(f"offload_kernels.{name.removesuffix('-split')}", old, new, tmp_path)
    with pytest.raises(AssertionError):
        CHECKS[name](broken)
