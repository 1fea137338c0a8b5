"""How fast are weights loaded: our loader against a plain clone of every tensor.

A sharded checkpoint is written to a temporary folder and read by both, in turn. The plain way is what a loader without
destinations does: `get_tensor(name).clone()` for every tensor. Both find the files in the page cache, and before each
arm as much memory as it needs is touched and given back: neither pays for the machine's first use of a page, and
neither finds what the last round left in the process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from bench.arguments import parser, positive
from bench.machine import GIB, describe, document, machine, save
from offload.backend import make_backend, specs_of, weights_of
from offload.config import OffloadConfig
from offload.cpu import CpuDevice
from offload.dummy import DummyWeights
from offload.errors import OffloadConfigWarning
from offload.host import map_anonymous
from offload.loader import load_weights, open_source
from offload.models import build
from offload.models.base import Architecture
from offload.plan import plan

TARGET_RATIO = 0.8
LAYER = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def model_of_at_least(nbytes: int) -> Architecture:
    """The smallest Llama with layers of `LAYER`'s size that has so many bytes, on meta."""
    one, two = (_nbytes(build({**LAYER, "num_hidden_layers": layers})) for layers in (1, 2))
    layers = 1 + max(0, -(-(nbytes - one) // (two - one)))
    return build({**LAYER, "num_hidden_layers": layers})


def _nbytes(model: Architecture) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def write_checkpoint(folder: Path, model: Architecture, shards: int) -> list[Path]:
    """Write random weights for `model` as shards of about equal size; returns their paths."""
    slices, reader, paths = model.checkpoint_slices(), DummyWeights().reader(CpuDevice()), []
    for names in dealt({name: prod(place.shape) for name, place in slices.items()}, shards):
        tensors = {name: torch.empty(slices[name].shape, dtype=torch.bfloat16) for name in names}
        for name, tensor in tensors.items():
            reader.read_into(name, tensor)
        paths.append(folder / f"part-{len(paths) + 1}.safetensors")
        save_file(tensors, paths[-1])
    reader.close()
    return paths


def dealt(sizes: Mapping[str, int], shards: int) -> list[list[str]]:
    """Deal names to `shards` lists, the largest first, each to the list that has least so far."""
    lists: list[list[str]] = [[] for _ in range(shards)]
    totals = [0] * shards
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        least = totals.index(min(totals))
        lists[least].append(name)
        totals[least] += sizes[name]
    return lists


def plain_clone(paths: Sequence[Path]) -> Callable[[], Any]:
    """The arm to compare with: every tensor taken from the library and cloned."""

    def run() -> dict[str, torch.Tensor]:
        kept = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    kept[name] = file.get_tensor(name).clone()
        return kept

    return run


def our_loader(folder: Path, model: Architecture) -> Callable[[], Any]:
    """From opening the folder to the last byte in the backend's memory; nothing is offloaded."""
    weights, device, config = weights_of(model, model.layers), CpuDevice(), OffloadConfig()
    empty = plan(specs_of(weights), config)

    def run() -> Any:
        source = open_source(folder)
        source.check(model)
        backend = make_backend(weights, empty, config, device)
        load_weights(source, model, backend.destination, device)
        return backend

    return run


class Sample(NamedTuple):
    """One load: by the clock, and the processor time of all its threads, which other work disturbs less."""

    elapsed_s: float
    cpu_s: float


def timed(run: Callable[[], Any], nbytes: int) -> Sample:
    """Time one run as if it were its process's first; what it loaded is dropped afterwards.

    A model is loaded once. What earlier rounds left in the C library's free lists is given back, or tensors that are
    allocated one by one would find pages that are already mapped; the machine itself has touched as many before.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others keep no such lists
    if trim is not None:
        trim(0)
    # Last, because a hypervisor may take pages back a moment after they were freed.
    map_anonymous(nbytes).fill_(1)
    start_cpu, start = time.process_time(), time.perf_counter()
    loaded = run()
    sample = Sample(time.perf_counter() - start, time.process_time() - start_cpu)
    del loaded
    return sample


def measure(nbytes: int, shards: int, repetitions: int) -> list[dict[str, Any]]:
    """Time both arms in turn, after one round that is not counted.

    Args:
        nbytes: least size of the checkpoint.
        shards: files it is written to.
        repetitions: samples of each arm.

    Returns:
        One row per arm: `load_s` and `cpu_s` (medians), `bytes_per_s`, `checkpoint_bytes`, `samples_s`.
    """
    model = model_of_at_least(nbytes)
    total_bytes = _nbytes(model)
    with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
        paths = write_checkpoint(Path(folder), model, shards)
        arms = {"get_tensor().clone()": plain_clone(paths), "offload.loader": our_loader(Path(folder), model)}
        samples: dict[str, list[Sample]] = {name: [] for name in arms}
        for round_ in tqdm(range(repetitions + 1), disable=not sys.stderr.isatty()):
            # Each arm is first in every other round, so that neither always runs in the other's wake.
            for name in sorted(arms, reverse=bool(round_ % 2)):
                samples[name].append(timed(arms[name], total_bytes))
    return [_row(name, values[1:], total_bytes, len(paths)) for name, values in samples.items()]


def _row(name: str, samples: list[Sample], total_bytes: int, shards: int) -> dict[str, Any]:
    median = statistics.median(sample.elapsed_s for sample in samples)
    return {
        "arm": name,
        "load_s": median,
        "cpu_s": statistics.median(sample.cpu_s for sample in samples),
        "bytes_per_s": total_bytes / median,
        "checkpoint_bytes": total_bytes,
        "shards": shards,
        "samples_s": [sample.elapsed_s for sample in samples],
    }


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Our time over the plain one's: of the medians, the least and greatest of one round, and of processor time."""
    plain, ours = rows
    rounds = [our / other for our, other in zip(ours["samples_s"], plain["samples_s"], strict=True)]
    return {
        "ratio": ours["load_s"] / plain["load_s"],
        "ratio_min": min(rounds),
        "ratio_max": max(rounds),
        "cpu_ratio": ours["cpu_s"] / plain["cpu_s"],
    }


def table(rows: Sequence[dict[str, Any]], found: dict[str, float]) -> str:
    """What is printed for people."""
    lines = [
        f"# Loading {rows[0]['checkpoint_bytes'] / GIB:.2f} GiB in {rows[0]['shards']} shards, warm cache\n",
        f"Machine: {describe(machine())}.\n",
        "| loader | median s | min s | max s | CPU s | GB/s |\n|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        values = (row["load_s"], min(row["samples_s"]), max(row["samples_s"]), row["cpu_s"])
        numbers = " | ".join(f"{value:.3f}" for value in values)
        lines.append(f"| {row['arm']} | {numbers} | {row['bytes_per_s'] / 1e9:.2f} |")
    spread = f"{found['ratio_min']:.2f} to {found['ratio_max']:.2f} in single rounds"
    lines.append(f"\nratio {found['ratio']:.2f} ({spread}), target at most {TARGET_RATIO};")
    lines.append(f"of processor time {found['cpu_ratio']:.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Parse the arguments, measure, print and save."""
    options = parser("load", __doc__)
    options.add_argument("--gib", type=float, default=2.0, help="least size of the checkpoint (default 2)")
    options.add_argument("--shards", type=positive, default=4, help="files it is written to (default 4)")
    options.add_argument("-r", "--repetitions", type=positive, default=7, help="default 7")
    options.add_argument("-o", "--output", choices=("md", "json"), default="md")
    options.add_argument("--save", metavar="FILE", help="write the result document, for example to bench/results/")
    arguments = options.parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadConfigWarning)
        rows = measure(int(arguments.gib * GIB), arguments.shards, arguments.repetitions)
    found = ratios(rows)
    if arguments.output == "json":
        print(json.dumps({"machine": machine(), **found, "rows": rows}, indent=1))
    else:
        print(table(rows, found))
    if arguments.save:
        save(document("load", argv, rows, **found, target_ratio=TARGET_RATIO), arguments.save)
    return 0
