"""Kernels that read weights over the bus: GB/s and share of the link, beside three baselines in the same run.

Every shape with every number of rows is computed by each schedule of the kernels and by three baselines: torch on a
resident weight, F.linear on a device view (what an engine without these kernels does), and copy-then-GEMM. Weights
rotate through 16 GiB of page-locked memory; ways are interleaved. The link's rates are probed in the same run.

Without a GPU nothing is timed: bytes over the bus and the least time they take on the hardware of --profile are
printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence

import torch

from bench import arguments
from bench.kernel_cases import BASELINES, Case, Device, Measured, cases, parse_shapes, verdicts
from bench.machine import GIB, describe, document, machine, save
from bench.ranges import parse_ints
from offload.errors import OffloadConfigError

FORMATS = ("md", "json")
_SHAPES = "4096x4096,14336x4096,28672x8192"
_ROWS = "1,16,64,256,512,2048,8192"


def table(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table; numbers to the right."""
    widths = [max(len(line[i]) for line in (heading, *lines)) for i in range(len(heading))]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    rows = [
        "| " + " | ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    head = "| " + " | ".join(text.rjust(width) for text, width in zip(heading, widths, strict=True)) + " |"
    return "\n".join([head, rule, *rows])


def bounds(found: Sequence[Case], device: Device) -> str:
    """The table without a GPU: bytes and least time of each case."""
    lines = [
        [
            f"{case.N}x{case.K}", str(case.M), case.way + (" *" if case.is_choice(None) else ""),
            f"{case.bus_bytes / 1e6:.1f}", f"{case.bus_s(device) * 1e3:.3f}", f"{case.bound_s(device) * 1e3:.3f}",
        ]
        for case in found
    ]  # fmt: skip
    return table(["N x K", "M", "way", "bus MB", "bus ms", "bound ms"], lines)


def speeds(rows: Sequence[Measured]) -> str:
    """The table of what was measured: median, spread, rate, and share of what the link does."""
    lines = []
    for row in rows:
        case = row.case
        shares = [f"{share:.3f}" if (share := row.share(link)) is not None else "-" for link in ("sm", "ce")]
        lines.append(
            [
                f"{case.N}x{case.K}",
                str(case.M),
                case.way + (" *" if case.is_choice(None) else ""),
                f"{case.bus_s(row) * 1e3:.3f}",
                f"{row.median_s * 1e3:.3f}",
                f"{min(row.samples_s) * 1e3:.3f}-{max(row.samples_s) * 1e3:.3f}",
                f"{row.weight_bytes_per_s / 1e9:.1f}",
                *shares,
            ]  # fmt: skip
        )
    return table(["N x K", "M", "way", "bus ms", "median ms", "min-max ms", "GB/s", "of sm", "of ce"], lines)


def measure(found: Sequence[Case], pool_bytes: int, repetitions: int) -> Iterator[Measured]:
    """Probe the link, then time the cases, all ways of one shape and number of rows in turns."""
    from bench.kernel_gpu import HostPool, calls, interleaved, time_on_device
    from offload_kernels import probe

    device = torch.device("cuda", torch.cuda.current_device())
    rates = probe(device, footprint_bytes=(pool_bytes,))  # kernel loads lose rate with the footprint
    with HostPool(pool_bytes) as pool, torch.inference_mode():
        for _, group in itertools.groupby(found, key=lambda case: (case.M, case.N, case.K)):
            together = list(group)
            times = interleaved([calls(case, pool, device) for case in together], repetitions, time_on_device)
            for case, samples in zip(together, times, strict=True):
                yield Measured(case, samples, rates.sm_bytes_per_s, rates.ce_bytes_per_s)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("kernels", __doc__)
    parser.add_argument("--shapes", default=_SHAPES, help=f"weights as NxK, a comma list (default {_SHAPES})")
    parser.add_argument("-m", "--rows", type=parse_ints, default=_ROWS, help=f"rows of x (default {_ROWS})")
    parser.add_argument("--dtype", choices=arguments.DTYPES, default="bfloat16", help="of x and the weight")
    parser.add_argument("-r", "--repetitions", type=arguments.positive, default=10, help="of each way (default 10)")
    parser.add_argument("--pool-gib", type=arguments.positive, default=16, help="host memory for weights (default 16)")
    parser.add_argument("--profile", default="h200-pcie5", help="hardware of the bounds without a GPU")
    parser.add_argument("-o", "--output", choices=FORMATS, default="md", help="form of the table (default md)")
    parser.add_argument("--save", metavar="FILE", help="also write a result document (JSON) to FILE")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the bench; returns the exit code."""
    options = _parser().parse_args(argv)
    found = list(cases(options.rows, parse_shapes(options.shapes), getattr(torch, options.dtype)))
    if not torch.cuda.is_available():
        return _print_bounds(found, options)
    rows = list(measure(found, options.pool_gib * GIB, options.repetitions))
    values, short = [row.as_dict() for row in rows], verdicts(rows)
    link = {"sm_bytes_per_s": rows[0].sm_bytes_per_s, "ce_bytes_per_s": rows[0].ce_bytes_per_s}
    if options.save:
        save(document("kernels", argv, values, link=link, short_of_target=short), options.save)
    if options.output == "json":
        print(json.dumps({"machine": machine(), "link": link, "short_of_target": short, "rows": values}, indent=1))
        return 0
    print(f"# Kernels over the bus, {options.dtype}\n\nMachine: {describe(machine())}.")
    sm, ce = (rate / 1e9 for rate in link.values())
    print(f"Link: kernel loads (sm) {sm:.1f} GB/s, the copy engine (ce) {ce:.1f} GB/s.")
    print(f"{_legend()}\n\n{speeds(rows)}\n")
    print("\n".join(f"Short of target: {line}." for line in short) or "Every target was met.")
    return 0


def _print_bounds(found: Sequence[Case], options: argparse.Namespace) -> int:
    """What can be said without a GPU."""
    from offload.virtual.profiles import load_profile

    if options.save:
        raise OffloadConfigError(
            "no GPU is here, so nothing was measured and --save has nothing to write: leave it out"
        )
    profile = load_profile(options.profile)
    if options.output == "json":
        rows = [
            {"M": c.M, "N": c.N, "K": c.K, "way": c.way, "bus_bytes": c.bus_bytes, "bound_s": c.bound_s(profile)}
            for c in found
        ]
        print(json.dumps({"measured": False, "profile": profile.name, "rows": rows}, indent=1))
        return 0
    print(f"# Kernels over the bus, {options.dtype}\n\nNo CUDA GPU here: nothing was timed. Bytes, and least times on")
    print(f"{profile.title} (--profile {profile.name}).\n{_legend()}\n\n{bounds(found, profile)}")
    return 0


def _legend() -> str:
    ways = "; ".join(f"{way}: {what}" for way, what in BASELINES.items())
    return f"`*` marks what `linear` chooses. Baselines: {ways}."
