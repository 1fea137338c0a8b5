"""Find the best configuration for a model, an amount of device memory and a GPU that need not be there.

Backends, budgets, groups and steps are searched; the most promising candidates run on the virtual GPU, without weights,
and the best few are printed with their simulated times and the JSON to paste. Times follow from the profile of the GPU:
measure before you rely on them.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from offload.commands._options import add_dtype, add_model, number
from offload.errors import OffloadConfigError
from offload.text import gib, shortened

if TYPE_CHECKING:
    from offload.planner import Prediction
    from offload.virtual import Profile

_UNITS = {"": 2**30, "gib": 2**30, "mib": 2**20, "gb": 10**9, "mb": 10**6}


def memory_bytes(text: str) -> int:
    """Read an amount of memory: "24GiB", "24 GB", "512MiB"; a number alone is GiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is no amount of memory: write 24GiB or 24GB")
    return int(float(match[1]) * _UNITS[match[2]])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    which = parser.add_mutually_exclusive_group(required=True)
    add_model(which)
    which.add_argument("--model-config", metavar="NAME|FILE", help="a shipped configuration, or a config.json")
    parser.add_argument("--device", metavar="virtual:NAME", required=True, help="the GPU: a profile's name or file")
    parser.add_argument(
        "--device-memory", metavar="SIZE", type=memory_bytes, help="what may be used, 24GiB (default: all of the GPU's)"
    )
    parser.add_argument("--batch", type=number(int, 1), default=1, help="sequences at a time (default 1)")
    parser.add_argument("--context", type=number(int, 8), default=4096, help="tokens of each (default 4096)")
    parser.add_argument("--top", type=number(int, 1), default=5, help="how many to print (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_dtype(parser)


def run(arguments: argparse.Namespace) -> int:
    """Search and print.

    Raises:
        OffloadConfigError: the device is not a virtual one.
        ModelLoadError: no such model or profile, or nothing fits.
    """
    # These import torch, which `--help` does not need.
    from offload.assemble import read_model
    from offload.model_configs import find
    from offload.planner import Workload, search

    profile = _profile(arguments.device)
    if arguments.device_memory is not None:
        profile = replace(profile, memory_bytes=arguments.device_memory)
    path, name = find(arguments.model_config) if arguments.model_config else (Path(arguments.model), arguments.model)
    described = read_model(path, "meta")[1]
    workload = Workload(path, described, arguments.batch, arguments.context, arguments.dtype)
    predictions = search(workload, profile)[: arguments.top]
    if arguments.json:
        print(json.dumps(_as_json(profile, arguments, predictions), indent=2))
    else:
        print("\n".join(_as_text(name, profile, arguments, predictions)))
    return 0


def _profile(device: str) -> "Profile":
    from offload.virtual import load_profile

    if not device.startswith("virtual:"):
        raise OffloadConfigError(f"--device {shortened(device)} is no virtual GPU: give virtual:NAME")
    return load_profile(device.removeprefix("virtual:"))


def _as_json(profile: "Profile", arguments: argparse.Namespace, predictions: Sequence["Prediction"]) -> dict:
    return {
        "simulated": True,
        "profile": profile.name,
        "device_memory_bytes": profile.memory_bytes,
        "batch": arguments.batch,
        "context": arguments.context,
        "predictions": [asdict(prediction) for prediction in predictions],
    }


def _as_text(
    name: str, profile: "Profile", arguments: argparse.Namespace, predictions: Sequence["Prediction"]
) -> Iterator[str]:
    yield f"model     {name}, batch {arguments.batch}, context {arguments.context}"
    yield f"device    {profile.title}, {gib(profile.memory_bytes)} to use; all times are simulated"
    yield ""
    header = ("tok/s", "step ms", "of bound", "stall ms", "prompt s", "device", "host", "backend")
    rows = [header, *map(_row, predictions)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row, config in zip(rows, [None, *(prediction.config for prediction in predictions)], strict=True):
        cells = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{cells}  {_short(config)}".rstrip()
    best = predictions[0]
    yield ""
    if best.config is None:
        yield "The model fits: no offload is needed."
    else:
        yield f"--offload-config '{json.dumps(best.config)}'"


def _row(prediction: "Prediction") -> tuple[str, ...]:
    return (
        f"{prediction.tokens_per_s:.2f}",
        f"{prediction.step_s * 1e3:.1f}",
        f"{prediction.bound_s / prediction.step_s:.3f}",
        f"{prediction.stall_s * 1e3:.1f}",
        f"{prediction.prompt_s:.2f}",
        gib(prediction.peak_device_bytes),
        gib(prediction.offloaded_bytes),
        prediction.backend,
    )


def _short(config: dict | None) -> str:
    """The fields of a configuration, without the braces and without the words that all of them share."""
    if config is None:
        return ""
    [fields] = config.values()
    return " ".join(f"{name.removeprefix('offload_')}={json.dumps(value)}" for name, value in fields.items())
