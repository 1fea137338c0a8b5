"""What the compiler made of every default tile, read from the machine code."""

from dataclasses import replace

import pytest
import torch

from bench import codegen, sass
from offload_kernels import aot, combine, probe_kernel, skinny, tiles
from tests.kernels.mutants import mutant

CASES = list(codegen.cases())


def name(case: codegen.Case) -> str:
    return f"{case.kernel}-{case.rows.removeprefix('<= ')}-sm_{case.arch}-{case.dtype}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_default_tile_keeps_the_rules(case):
    row = codegen.inspect(case)
    assert not codegen.faults(row), row


def test_the_cases_are_every_kernel_on_every_architecture():
    found = {(case.kernel, case.arch) for case in CASES}
    assert found == {(kernel, arch) for kernel in codegen.KERNELS for arch in (80, 89, 90, 100, 120)}


def test_a_profiler_can_tell_the_kernels_apart():
    names = {case.module.__name__: case.spec.kernel for case in CASES}
    assert len(names) == len(set(names.values())) == 3


def a_case(kernel: str, arch: int = 90, dtype: str = "bf16", **changed) -> codegen.Case:
    """The last default case of a kernel, which is the one with a ring if there is one, with something changed."""
    found = [case for case in CASES if (case.kernel, case.arch, case.dtype) == (kernel, arch, dtype)]
    return replace(found[-1], **changed)


def test_rows_that_are_not_aligned_are_loaded_element_by_element():
    tile = tiles.pick("skinny", 1, 2, 90)
    row = codegen.inspect(a_case("skinny", tile=tile, spec=skinny.specialise(tile, torch.bfloat16, aligned=False)))
    assert row.weight_load_bytes == 2
    assert row.stack_bytes == 0


@pytest.mark.parametrize("arch", aot.ARCHES)
def test_the_small_kernels_use_no_stack(arch):
    sums = [
        (skinny, skinny.specialise_sum(torch.bfloat16)),
        (combine, combine.specialise(torch.bfloat16, "i64", "fp32", 8)),
    ]
    for module, spec in sums:
        resources = sass.disassemble(aot.build(module, spec, arch).cubin, codegen.SOURCES).resources
        assert resources.stack_bytes == resources.local_bytes == 0


@pytest.mark.parametrize("request_bytes", [64, 128, 512])
def test_the_probe_asks_for_what_it_says(request_bytes):
    binary = aot.build(probe_kernel, probe_kernel.specialise(request_bytes, stages=4), 90)
    code, consts = sass.disassemble(binary.cubin, codegen.SOURCES), probe_kernel.constants(request_bytes, 4)
    assert {each.load_bytes for each in code.loads(lambda source: "tl.load(" in source)} == {16}
    assert sass.contiguous_bytes(binary.ttgir, consts["BLOCK_R"], consts["BLOCK_W"], 4) == request_bytes
    assert code.resources.stack_bytes == 0


def test_a_tile_too_large_for_the_registers_is_found():
    tile = tiles.SkinnyTile(64, 256, 64, 3, 4)
    row = codegen.inspect(a_case("skinny", 80, tile=tile, spec=skinny.specialise(tile, torch.bfloat16)))
    assert any("bytes of stack" in fault for fault in codegen.faults(row))


def test_a_tile_of_half_lines_is_found():
    tile = tiles.SkinnyTile(64, 16, 32, 4, 4)
    row = codegen.inspect(a_case("skinny", tile=tile, spec=skinny.specialise(tile, torch.bfloat16)))
    assert any("a request has 64 bytes" in fault for fault in codegen.faults(row))


def test_too_few_bytes_in_flight_are_found():
    faults = codegen.faults(replace(codegen.inspect(a_case("skinny")), in_flight_bytes=200 << 10))
    assert faults == ["204800 bytes in flight do not fill c2c (343040)"]


MUTANTS = {  # the sequential interpreter would pass each of them
    "wide-barrier": ("wide", "bf16", "tl.debug_barrier()", "pass", "no barrier"),
    "experts-barrier": ("down", "bf16", "tl.debug_barrier()", "pass", "no barrier"),
    "tf32": ("skinny", "fp32", 'input_precision="ieee"', 'input_precision="tf32"', "fp32 is rounded to tf32"),
    "stride-without-unit": ("skinny", "bf16", "(w_stride * W_UNIT)", "w_stride", "a weight load has"),
}


@pytest.mark.parametrize("kernel, dtype, old, new, fault", MUTANTS.values(), ids=MUTANTS)
def test_a_fault_put_in_is_found(kernel, dtype, old, new, fault, tmp_path):
    case = a_case(kernel, dtype=dtype)
    broken = mutant(case.module.__name__, old, new, tmp_path)
    found = codegen.faults(codegen.inspect(replace(case, module=broken)))
    assert any(fault in text for text in found), found
