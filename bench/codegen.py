"""What is in the machine code: every default tile, compiled for every architecture, disassembled and checked.

For each kernel, tile, architecture and dtype: registers, stack, shared memory, the width of the weight's loads, the
bytes that one warp asks for in one row, the tensor-core instructions, and the weight bytes that a default launch keeps
on their way. Nothing is timed, so no GPU is needed. Exit code 1 if a tile breaks one of the rules in `faults`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tqdm import tqdm

import offload_kernels
from bench import sass
from bench.arguments import parser
from bench.machine import document, save, versions
from offload_kernels import aot, grouped, skinny, tiles, wide
from offload_kernels.tiles import Specialisation, Tile

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SOURCES = sorted(Path(offload_kernels.__file__).parent.glob("*.py"))
KERNELS = ("skinny", "wide", "gate_up", "down")
EVERY_DTYPE_ON = 90  # fp16 and fp32 differ from bf16 in little: one architecture is enough

# Bytes on their way = bandwidth x latency (Little's law): 55 GB/s x 1.1 us for PCIe 5 x16, 342 GB/s x 1 us for C2C.
LINKS_BYTES = {"pcie5": 60 << 10, "c2c": 335 << 10}

# The launches that are judged: a dense weight of 32 MiB, and one token's experts of a Qwen3-30B-A3B layer.
DENSE_N = DENSE_K = 4096
EXPERTS, EXPERT_I, EXPERT_H = 8, 768, 2048


@dataclass(frozen=True)
class Case:
    """One kernel with one tile for one architecture and dtype."""

    kernel: str
    rows: str
    arch: int
    dtype: str
    module: ModuleType
    spec: Specialisation
    tile: Tile
    halves: int
    programs: int
    ring: bool

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Row:
    """What was found in one kernel's code; all sizes in bytes."""

    kernel: str
    rows: str
    arch: str
    dtype: str
    block_n: int
    block_m: int
    block_k: int
    stages: int
    warps: int
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    shared_limit_bytes: int
    weight_load_bytes: int
    request_bytes: int
    tensor_core: str
    tf32: bool
    ring_barriers: int | None
    programs: int
    in_flight_bytes: int


def cases(archs: Sequence[int] = aot.ARCHES, dtypes: Sequence[str] = tuple(DTYPES)) -> Iterator[Case]:
    """Every default tile: bf16 on all of ``archs``, the other dtypes on `EVERY_DTYPE_ON`."""
    for arch in archs:
        for dtype in dtypes:
            if dtype == "bf16" or arch == EVERY_DTYPE_ON:
                for kernel in KERNELS:
                    yield from _cases_of(kernel, arch, dtype)


def _cases_of(kernel: str, arch: int, dtype: str) -> Iterator[Case]:
    kind = DTYPES[dtype]
    for limit, tile in tiles.table(kernel, kind.itemsize, arch).items():
        rows = f"<= {limit}" if limit else "any"
        if kernel == "skinny":
            programs = skinny.plan(tile, DENSE_N, DENSE_K, kind.itemsize).programs
            yield Case(kernel, rows, arch, dtype, skinny, skinny.specialise(tile, kind), tile, 1, programs, False)
        elif kernel == "wide":
            programs = wide.plan(tile, DENSE_N, DENSE_K, kind.itemsize, processors=108).programs
            yield Case(kernel, rows, arch, dtype, wide, wide.specialise(tile, kind), tile, 1, programs, True)
        else:
            yield _experts_case(kernel, rows, arch, dtype, tile, ring=not limit)


def _experts_case(kernel: str, rows: str, arch: int, dtype: str, tile: Tile, ring: bool) -> Case:
    gated = kernel == "gate_up"
    kind, halves, N = DTYPES[dtype], 2 if gated else 1, EXPERT_I if gated else EXPERT_H
    blocks = EXPERTS * -(-N // tile.block_n)
    programs = grouped.programs_of(tile, blocks, halves, kind.itemsize, ring, processors=108)
    spec = grouped.specialise(tile, kind, gather=EXPERTS if gated else 0, scatter=not gated, gated=gated, ring=ring)
    return Case(kernel, rows, arch, dtype, grouped, spec, tile, halves, programs, ring)


def is_weight_load(source: str) -> bool:
    """Whether a line of a kernel loads weights: the kernels call the tile w, or w_up."""
    return source.startswith(("w = tl.load(", "w_up = tl.load("))


def inspect(case: Case) -> Row:
    """Compile one case and read its code."""
    binary = aot.build(case.module, case.spec, case.arch)
    code = sass.disassemble(binary.cubin, {*SOURCES, Path(case.module.__file__)})
    loads = [each.load_bytes for each in code.loads(is_weight_load)]
    size, tile = case.element_bytes, case.tile
    return Row(
        kernel=case.kernel,
        rows=case.rows,
        arch=f"sm_{case.arch}",
        dtype=case.dtype,
        block_n=tile.block_n,
        block_m=tile.block_m,
        block_k=tile.block_k,
        stages=tile.stages,
        warps=tile.warps,
        registers=code.resources.registers,
        stack_bytes=code.resources.stack_bytes,
        local_bytes=code.resources.local_bytes,
        shared_bytes=binary.shared_bytes + code.resources.static_shared_bytes,
        shared_limit_bytes=tiles.shared_limit_bytes(case.arch),
        weight_load_bytes=min(loads, default=0),
        request_bytes=sass.contiguous_bytes(binary.ttgir, tile.block_n, tile.block_k, size),
        tensor_core=" ".join(code.tensor_cores()),
        tf32=".tf32" in binary.ptx,
        ring_barriers=ring_barriers(code) if case.ring else None,
        programs=case.programs,
        in_flight_bytes=case.programs * tile.in_flight_bytes(size) * case.halves,
    )


def ring_barriers(code: sass.Code) -> int:
    """Barriers of the source that order the ring; 0 if none stands between the last write of it and the next read."""
    barriers = [
        each.address
        for each in code.instructions
        if each.opcode.startswith("BAR.SYNC") and each.source.startswith("tl.debug_barrier(")
    ]
    writes = [
        each.address
        for each in code.instructions
        if each.opcode.startswith("STG") and each.source.startswith("tl.store(slot")
    ]
    last_write = max(writes)
    next_read = min(each.address for each in code.loads(is_weight_load) if each.address > last_write)
    between = any(last_write < address < next_read for address in barriers)
    return len(barriers) if between else 0


def faults(row: Row) -> list[str]:
    """The rules that a tile's code breaks, in words."""
    threads = 32 * row.warps
    rules = {
        f"it uses {row.stack_bytes} bytes of stack": row.stack_bytes == 0,
        f"it uses {row.local_bytes} bytes of local memory": row.local_bytes == 0,
        f"{row.registers} registers x {threads} threads exceed the register file": row.registers * threads <= 65536,
        f"{row.shared_bytes} bytes of shared memory exceed {row.shared_limit_bytes}": row.shared_bytes
        <= row.shared_limit_bytes,
        f"a weight load has {row.weight_load_bytes} bytes, not 16": row.weight_load_bytes == 16,
        f"a request has {row.request_bytes} bytes, less than a line of {tiles.LINE_BYTES}": row.request_bytes
        >= tiles.LINE_BYTES,
        "no tensor-core instruction": row.dtype == "fp32" or row.tensor_core != "",
        "fp32 is rounded to tf32": not row.tf32,
        "no barrier between writing and reading the ring": row.ring_barriers is None or row.ring_barriers >= 2,
    }
    rules |= {
        f"{row.in_flight_bytes} bytes in flight do not fill {link} ({needed})": row.in_flight_bytes > needed
        for link, needed in LINKS_BYTES.items()
    }
    return [text for text, kept in rules.items() if not kept]


def markdown(rows: Sequence[Row]) -> str:
    """The table of tiles."""
    lines = [
        "| kernel | rows of x | arch | dtype | tile N x M x K | stages | warps | registers | shared KiB "
        "| in flight KiB | product |",
        "|---|---|---|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        tile = f"{row.block_n} x {row.block_m} x {row.block_k}"
        sizes = f"{row.shared_bytes / 1024:.0f} | {row.in_flight_bytes / 1024:.0f}"
        lines.append(
            f"| {row.kernel} | {row.rows} | {row.arch} | {row.dtype} | {tile} | {row.stages} | {row.warps} "
            f"| {row.registers} | {sizes} | {row.tensor_core or 'FFMA'} |"
        )
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Short table of `kernels/README.md`: bf16, architectures with the same tile in one line, the worst of each."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.dtype == "bf16":
            tile = (row.block_n, row.block_m, row.block_k, row.stages, row.warps)
            groups.setdefault((row.kernel, row.rows, tile), []).append(row)
    lines = [
        "| kernel | rows of x | sm | tile N x M x K | stages | warps | registers | shared KiB | in flight KiB |",
        "|---|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for (kernel, limit, (n, m, k, stages, warps)), found in sorted(groups.items(), key=_order):
        archs = ", ".join(row.arch.removeprefix("sm_") for row in found)
        largest = [max(getattr(row, name) for row in found) for name in ("registers", "shared_bytes")]
        flight = min(row.in_flight_bytes for row in found)
        lines.append(
            f"| {kernel} | {limit} | {archs} | {n} x {m} x {k} | {stages} | {warps} | {largest[0]} "
            f"| {largest[1] / 1024:.0f} | {flight / 1024:.0f} |"
        )
    return "\n".join(lines)


def _order(group: tuple[tuple[Any, ...], list[Row]]) -> tuple[int, float, str]:
    (kernel, limit, _), found = group
    return KERNELS.index(kernel), math.inf if limit == "any" else int(limit.removeprefix("<= ")), found[0].arch


def main(argv: Sequence[str]) -> int:
    """Parse the arguments, compile, print, save, and say what is wrong."""
    words = parser("codegen", __doc__)
    words.add_argument("--arch", type=_archs, default=aot.ARCHES, help="such as sm_90 or 80,90 (default: all five)")
    words.add_argument("-o", "--output", choices=("md", "summary", "json"), default="md", help="form (default md)")
    words.add_argument("--save", metavar="FILE", help="also write a result document, for example to bench/results/")
    arguments = words.parse_args(argv)
    todo = list(cases(arguments.arch))
    rows = [inspect(case) for case in tqdm(todo, unit="kernel", disable=not sys.stderr.isatty())]
    if arguments.output == "json":
        print(json.dumps({"versions": versions(), "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print(summary(rows) if arguments.output == "summary" else markdown(rows))
    if arguments.save:
        save(
            document("codegen", argv, [asdict(row) for row in rows], needed_in_flight_bytes=LINKS_BYTES), arguments.save
        )
    broken = [f"{row.kernel} {row.rows} {row.arch} {row.dtype}: {text}" for row in rows for text in faults(row)]
    print(*broken, sep="\n", end="\n" if broken else "", file=sys.stderr)
    return 1 if broken else 0


def _archs(text: str) -> tuple[int, ...]:
    archs = tuple(int(word) for word in text.replace("sm_", "").split(","))
    if unknown := set(archs) - set(aot.ARCHES):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)} are not among {aot.ARCHES}")
    return archs
