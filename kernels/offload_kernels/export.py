"""Kernels for engines without Python: cubins, a manifest, and C that picks one and launches it through the CUDA driver.

`python -m offload_kernels.export --kernel skinny --dtype bf16 --arch sm_90 --out DIR` needs triton and no GPU. The
cubins are those of rows that begin on 16 bytes; the C refuses everything that they were not compiled for.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

import torch

from offload_kernels import aot, combine, grouped, runtime, skinny, tiles
from offload_kernels.checks import MOST_STRIDE
from offload_kernels.tiles import Specialisation, Tile

DTYPES = {name: dtype for dtype, name in runtime.DTYPES.items()}
KERNELS = ("skinny", "grouped")
_PARAMETER = re.compile(r"\.param \.(\w+)")


@dataclass(frozen=True)
class Variant:
    """One compiled kernel and what its launcher must know.

    Args:
        name: Of its file, without the suffix.
        rows: Most rows of x that it takes; 0 for any number.
        tile: Its tile; None for a kernel that only adds.
        saturating: Programs that keep the link full.
        binary: The code.
    """

    name: str
    rows: int
    tile: Tile | None
    saturating: int
    binary: aot.Binary

    def entry(self) -> dict[str, Any]:
        """What the manifest says of it."""
        block = {} if self.tile is None else {f"block_{axis}": getattr(self.tile, f"block_{axis}") for axis in "nmk"}
        return {
            "file": f"{self.name}.cubin",
            "symbol": self.binary.symbol,
            "rows": self.rows,
            **block,
            "saturating_programs": self.saturating,
            "threads": self.binary.threads,
            "shared_bytes": self.binary.shared_bytes,
            "arguments": [*self.binary.arguments, "global_scratch", "profile_scratch"],
            "types": parameters(self.binary.ptx),
        }


def export(kernel: str, dtype: str, arch: int, out: Path, top_k: int = 8) -> dict[str, Any]:
    """Compile a kernel for every bucket of rows and write cubins, ``manifest.json``, a C header and a C source.

    Args:
        kernel: ``skinny`` or ``grouped``.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        arch: Compute capability as an integer, one of `aot.ARCHES`.
        out: Folder, made if it does not exist.
        top_k: Experts per token; only for ``grouped``.

    Returns:
        The manifest.

    Raises:
        RuntimeError: This process interprets kernels.
    """
    prefix = f"offload_{kernel}_{dtype}_sm_{arch}"
    variants = (_skinny if kernel == "skinny" else _grouped)(DTYPES[dtype], arch, top_k)
    manifest = {
        "kernel": kernel,
        "dtype": dtype,
        "arch": f"sm_{arch}",
        "row_alignment_bytes": runtime.VECTOR_BYTES,
        **({"top_k": top_k} if kernel == "grouped" else {}),
        "kernels": [variant.entry() for variant in variants],
    }
    out.mkdir(parents=True, exist_ok=True)
    for variant in variants:
        (out / f"{variant.name}.cubin").write_bytes(variant.binary.cubin)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    values = _values(kernel, dtype, arch, prefix, variants, top_k)
    for suffix in ("h", "c"):
        (out / f"{prefix}.{suffix}").write_text(_render(kernel, suffix, values), encoding="utf-8")
    return manifest


def parameters(ptx: str) -> list[str]:
    """Types of the kernel's parameters in order, as PTX writes them (``u64``, ``u32``)."""
    head = ptx[ptx.index(".entry") :]
    return _PARAMETER.findall(head[: head.index("{")])


def _skinny(dtype: torch.dtype, arch: int, top_k: int) -> list[Variant]:
    """Every tile without and with a split K, then the sum."""
    size, variants = dtype.itemsize, []
    table = sorted(tiles.table("skinny", size, arch).items())
    for split in (False, True):
        for rows, tile in table:
            binary = _build(skinny, skinny.specialise(tile, dtype, split=split), arch)
            name = f"skinny_m{rows}{'_split' if split else ''}"
            variants.append(Variant(name, rows, tile, runtime.saturating_programs(tile, size), binary))
    return [*variants, Variant("skinny_sum", 0, None, 0, _build(skinny, skinny.specialise_sum(dtype), arch))]


def _grouped(dtype: torch.dtype, arch: int, top_k: int) -> list[Variant]:
    """Gate-up, then down: few tokens, as many as a tile holds, and any number through the ring; then the sum."""
    size, variants = dtype.itemsize, []
    for kind, options in (("gate_up", {"gather": top_k, "gated": True}), ("down", {"scatter": True})):
        table = tiles.table(kind, size, arch)
        buckets = [(rows or tile.block_m, tile, False) for rows, tile in sorted(table.items(), reverse=True) if rows]
        buckets += [(table[0].block_m, table[0], False), (0, table[0], True)]
        for rows, tile, ring in buckets:
            binary = _build(grouped, grouped.specialise(tile, dtype, ring=ring, **options), arch)
            name = f"{kind}_m{rows}" if rows else f"{kind}_ring"
            variants.append(Variant(name, rows, tile, runtime.saturating_programs(tile, size), binary))
    last = _build(combine, combine.specialise(dtype, "i64", "fp32", top_k), arch)
    return [*variants, Variant("combine", 0, None, 0, last)]


def _build(module: ModuleType, spec: Specialisation, arch: int) -> aot.Binary:
    """What is shipped does not name the paths of the machine that compiled it."""
    return aot.build(module, spec, arch, line_info=False)


def _values(
    kernel: str, dtype: str, arch: int, prefix: str, variants: Sequence[Variant], top_k: int
) -> dict[str, object]:
    """What the templates are filled with."""
    size = DTYPES[dtype].itemsize
    experts = f" for {top_k} experts per token" if kernel == "grouped" else ""
    return {
        "summary": f"{kernel}, {dtype}, sm_{arch}{experts}",
        "prefix": prefix,
        "guard": prefix.upper(),
        "count": len(variants),
        "images": "\n".join(_image(number, variant.binary.cubin) for number, variant in enumerate(variants)),
        "kernels": "\n".join(_row(number, variant) for number, variant in enumerate(variants)),
        "vector": runtime.VECTOR_BYTES // size,
        "element_bytes": size,
        "line_elements": runtime.line_elements(size),
        "dtype_constant": f"OFFLOAD_{dtype.upper()}",
        "buckets": (len(variants) - 1) // 2,
        "most_rows": max(variant.rows for variant in variants),
        "sum_block": skinny.SUM_BLOCK,
        "min_steps": skinny.MIN_STEPS,
        "combine_block": combine.BLOCK,
        "top_k": top_k,
        "most_stride": MOST_STRIDE,
    }


def _render(kernel: str, suffix: str, values: dict[str, object]) -> str:
    folder = Path(__file__).parent
    parts = [(folder / f"export_{part}.{suffix}.in").read_text(encoding="utf-8") for part in ("common", kernel)]
    return Template("".join(parts)).substitute(values)


def _image(number: int, cubin: bytes) -> str:
    lines = [",".join(map(str, cubin[start : start + 32])) for start in range(0, len(cubin), 32)]
    return f"static const _Alignas(16) unsigned char IMAGE_{number}[] = {{\n" + ",\n".join(lines) + "};"


def _row(number: int, variant: Variant) -> str:
    tile, binary = variant.tile, variant.binary
    block = "0, 0, 0" if tile is None else f"{tile.block_n}, {tile.block_m}, {tile.block_k}"
    return (
        f'    {{IMAGE_{number}, "{binary.symbol}", {variant.rows}, {block}, {binary.threads}, {binary.shared_bytes}, '
        f"{variant.saturating}}}, /* {variant.name} */"
    )


def main(argv: Sequence[str]) -> int:
    """Parse the arguments, export, and say what was written."""
    words = argparse.ArgumentParser(prog="python -m offload_kernels.export", description=__doc__.partition("\n")[0])
    words.add_argument("--kernel", choices=KERNELS, required=True)
    words.add_argument("--dtype", choices=sorted(DTYPES), required=True)
    words.add_argument("--arch", choices=[f"sm_{arch}" for arch in aot.ARCHES], required=True)
    words.add_argument("--out", type=Path, required=True, help="folder for the files")
    words.add_argument("--top-k", type=int, default=8, help="experts per token, for --kernel grouped (default 8)")
    arguments = words.parse_args(argv)
    if arguments.top_k < 1:
        words.error(f"--top-k {arguments.top_k} is less than 1")
    try:
        manifest = export(
            arguments.kernel, arguments.dtype, int(arguments.arch.removeprefix("sm_")), arguments.out, arguments.top_k
        )
    except (RuntimeError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    print(f"{len(manifest['kernels'])} cubins, manifest.json and C in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
