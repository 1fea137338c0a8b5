"""What do the hooks cost: host time per offloaded layer and pass, without the copy itself.

Layers as small as they can be run with and without a backend, on a device that does everything but copy. What remains
between the two is Python: the hooks, events, checks, and the four products that go through our own linear layer.
Time is the issuing thread's own CPU time, so that what else runs on the machine does not count. Events are free on a
CPU; what a GPU's events add is not in these numbers.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from bench.arguments import parser, positive
from bench.machine import describe, document, machine, save
from offload.backend import make_backend, specs_of, weights_of
from offload.config import OffloadConfig
from offload.cpu import CpuDevice
from offload.device import Stream
from offload.errors import OffloadConfigWarning
from offload.plan import plan

TARGET_S = 15e-6
ARMS = {
    "uva": '{"uva": {"cpu_offload_gb": 1}}',
    "prefetch, step 1": '{"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 1}}',
    "prefetch, step 4": '{"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 4}}',
}


class _NoCopyDevice(CpuDevice):
    """A CPU whose copies are left out once the weights are in place."""

    copies = True

    def copy(self, destination: Tensor, source: Tensor, stream: Stream = None) -> None:
        if self.copies:
            super().copy(destination, source, stream)


class _Layer(nn.Module):
    """Four products of one number, as many as a decoder layer has matrices, and one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(4))
        self.norm = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = linear(x)
        return x


class _Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _offloaded(config: OffloadConfig, count: int) -> _Stack:
    device, model = _NoCopyDevice(), _Stack(count)
    state = model.state_dict()
    weights = weights_of(model, model.layers)
    backend = make_backend(weights, plan(specs_of(weights), config), config, device)
    for name, value in state.items():
        backend.destination(name).copy_(value)
    backend.attach(model, model.layers)
    device.copies = False
    return model


def _pass_cpu_s(model: nn.Module, x: Tensor, passes: int) -> float:
    start = time.thread_time()
    for _ in range(passes):
        model(x)
    return (time.thread_time() - start) / passes


def measure(layers: int, passes: int, repetitions: int) -> list[dict[str, Any]]:
    """Time every arm, interleaved with the plain model.

    Args:
        layers: offloaded layers of the model.
        passes: passes that one sample averages over.
        repetitions: samples of each arm.

    Returns:
        One row per arm: `hooks_s` (median per offloaded layer and pass) and `samples_s`.
    """
    models = {name: _offloaded(OffloadConfig.of(text), layers) for name, text in ARMS.items()}
    plain, x = _Stack(layers), torch.ones(1, 1)
    samples: dict[str, list[float]] = {name: [] for name in ARMS}
    with torch.inference_mode():
        for model in (plain, *models.values()):
            _pass_cpu_s(model, x, passes)
        for _ in tqdm(range(repetitions), disable=not sys.stderr.isatty()):
            for name, model in models.items():
                plain_s = _pass_cpu_s(plain, x, passes)
                samples[name].append((_pass_cpu_s(model, x, passes) - plain_s) / layers)
    return [
        {"backend": name, "config": ARMS[name], "hooks_s": statistics.median(values), "samples_s": values}
        for name, values in samples.items()
    ]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| backend | median us | min us | max us | target us |", "|---|--:|--:|--:|--:|"]
    for row in rows:
        seconds = (row["hooks_s"], min(row["samples_s"]), max(row["samples_s"]), TARGET_S)
        lines.append(f"| {row['backend']} | " + " | ".join(f"{value * 1e6:.1f}" for value in seconds) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Parse the arguments, measure, print and save."""
    options = parser("hooks", __doc__)
    options.add_argument("--layers", type=positive, default=32, help="offloaded layers of the stand-in model")
    options.add_argument("--passes", type=positive, default=50, help="passes that one sample averages over")
    options.add_argument("-r", "--repetitions", type=positive, default=15)
    options.add_argument("-o", "--output", choices=("md", "json"), default="md")
    options.add_argument("--save", metavar="FILE", help="also write a result document (JSON) to FILE")
    arguments = options.parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadConfigWarning)
        rows = measure(arguments.layers, arguments.passes, arguments.repetitions)
    if arguments.output == "json":
        print(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    else:
        print(f"# Hooks: host time per offloaded layer and pass (CPU times)\n\nMachine: {describe(machine())}.\n")
        print(_table(rows))
    if arguments.save:
        save(document("hooks", argv, rows), arguments.save)
    return 0
