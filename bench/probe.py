"""What does this machine's link do: kernel loads by programs and request size, the copy engine, and by footprint.

With --save-profile the rates of the link, of device memory and of matrix products and the costs of starting an operator
become a hardware profile: `virtual:FILE` is then a virtual GPU with the speed of this one, for `bench` and for
`python -m offload plan`, and `--profile FILE` gives measured rows their bound. Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from bench import arguments
from bench.gpu_rates import GpuRates, measure
from bench.machine import GIB, describe, document, machine, portable, save
from bench.ranges import parse_floats, parse_ints
from offload.device import open_device
from offload.errors import OffloadConfigError
from offload.host import free_host_memory
from offload.virtual.profiles import Profile, dump_profile
from offload_kernels import LinkRates, probe

MIB = 1 << 20


def profile_of(
    title: str, capability: int, memory_bytes: int, host_bytes: int, link: LinkRates, rates: GpuRates
) -> Profile:
    """Make a hardware profile of what was measured.

    Args:
        title: the GPU's name.
        capability: as an integer, 90.
        memory_bytes, host_bytes: of the device and of the host.
        link, rates: the measurements.
    """
    footprint = max((point.footprint_bytes for point in link.measurements), default=0)
    measured = f"Measured by `python -m bench probe` on {title}"
    told = f"Told by {title} and its host"
    sources = {field.name: measured for field in fields(GpuRates)}
    sources |= dict.fromkeys(("compute_capability", "memory_bytes", "host_memory_bytes"), told)
    at = f"{measured}, {footprint / GIB:g} GiB of host memory"
    sources |= dict.fromkeys(("sm_bytes_per_s", "ce_bytes_per_s"), at)
    return Profile(
        name=re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"),
        title=title,
        compute_capability=capability,
        memory_bytes=memory_bytes,
        host_memory_bytes=host_bytes,
        sm_bytes_per_s=int(link.sm_bytes_per_s),
        ce_bytes_per_s=int(link.ce_bytes_per_s),
        sources=sources,
        **asdict(rates),
    )


def table(link: LinkRates) -> Iterator[str]:
    """The measurements as lines of a table, the fastest kernel loads of each footprint marked."""
    yield "| footprint GiB | by | programs | stages | request bytes | GB/s |"
    yield "|--:|:--|--:|--:|--:|--:|"
    for point in link.measurements:
        alike = [p for p in link.measurements if (p.engine, p.footprint_bytes) == (point.engine, point.footprint_bytes)]
        best = " best" if point.bytes_per_s == max(p.bytes_per_s for p in alike) and len(alike) > 1 else ""
        shape = [str(value or "-") for value in (point.programs, point.stages, point.request_bytes)]
        engine = {"sm": "kernel loads", "ce": "copy engine"}[point.engine]
        cells = [f"{point.footprint_bytes / GIB:g}", engine, *shape, f"{point.bytes_per_s / 1e9:.2f}{best}"]
        yield f"| {' | '.join(cells)} |"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        OffloadConfigError: it is wrong.
    """
    parser = arguments.parser("probe", __doc__)
    parser.add_argument("--device", default="cuda", help="cuda or cuda:1 (default cuda)")
    parser.add_argument("--footprint", type=parse_floats, default="0.25,4", metavar="GIB[,GIB...]", help="host memory")
    parser.add_argument("--programs", type=parse_ints, default="2,8,22,64", help="readers (default 2,8,22,64)")
    parser.add_argument("--stages", type=parse_ints, default="4", help="pipeline depths (default 4)")
    parser.add_argument("--request-bytes", type=parse_ints, default="64,128,512", help="default 64,128,512")
    parser.add_argument("-r", "--repetitions", type=arguments.positive, default=3, help="default 3")
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md", help="form of the result (default md)")
    parser.add_argument("--save", metavar="FILE", type=Path, help="also write a result document (JSON) to FILE")
    parser.add_argument("--save-profile", metavar="FILE", type=Path, help="write a hardware profile (.json) to FILE")
    args = parser.parse_args(argv)
    if not args.device.startswith("cuda"):
        raise OffloadConfigError(f"--device {args.device}: only a CUDA GPU has a link to measure, give cuda or cuda:1")
    if args.save_profile and args.save_profile.suffix != ".json":
        raise OffloadConfigError(f"--save-profile {args.save_profile}: a profile's file name ends in .json")
    return args


def main(argv: Sequence[str]) -> int:
    """Run `python -m bench probe`; returns the exit code."""
    args = parse(argv)
    device = open_device(args.device).torch_device
    link = probe(
        device,
        footprint_bytes=[round(gib * 1024) * MIB for gib in args.footprint],
        programs=args.programs,
        stages=args.stages,
        request_bytes=args.request_bytes,
        repetitions=args.repetitions,
    )
    rows = [asdict(point) for point in link.measurements]
    if args.output == "json":
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
    else:
        print(f"# The link of this machine\n\nMachine: {describe(machine())}.\n", *table(link), sep="\n")
        print(f"\nkernel loads {link.sm_bytes_per_s / 1e9:.2f} GB/s, copies {link.ce_bytes_per_s / 1e9:.2f} GB/s")
    if args.save:
        save(document("probe", argv, rows), args.save)
    if args.save_profile:
        args.save_profile.write_text(dump_profile(_measured_profile(device, link)))
        print(f"profile {portable(str(args.save_profile))}", file=sys.stderr)
    return 0


def _measured_profile(device: object, link: LinkRates) -> Profile:
    import torch

    properties = torch.cuda.get_device_properties(device)
    capability = properties.major * 10 + properties.minor
    host_bytes = free_host_memory().total_bytes
    return profile_of(properties.name, capability, properties.total_memory, host_bytes, link, measure(device))
