"""How long does simulating take: one decode step of a large model, a sweep of 60 configurations, a search.

The virtual GPU is only of use where an answer comes sooner than it would from a GPU. Every row is what a user waits
for, with the time that was promised; models run without weights. Beside the wall time stands the CPU time, which what
else runs on the machine changes less.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.arguments import parser, positive
from bench.machine import REPOSITORY, describe, document, machine, save
from offload.engine import load
from offload.errors import OffloadConfigError
from offload.model_configs import find
from offload.virtual import VirtualDevice

PROFILE = "h200-pcie5"
WARM_STEPS = 2
PROMPT = 16
HALF = {"prefetch": {"offload_group_size": 2, "offload_prefetch_step": 2}}
SWEEP = ["bench", "step", "--model-config", "llama-3.1-8b", "--load-format", "meta", "--device", f"virtual:{PROFILE}"]
SIXTY = ["--offload-group-size", "3-6", "--offload-num-in-group", "1-4", "--offload-prefetch-step", "1-4"]
SEARCH = ["offload", "plan", "--model-config", "llama-3.1-70b", "--device", "virtual:rtx4090-pcie4"]


@dataclass(frozen=True)
class Wait:
    """One thing to wait for.

    Attributes:
        what: as the table calls it.
        limit_s: the wall time that was promised, on two idle cores.
        wall_s, cpu_s: medians.
        samples_s: every wall time.
    """

    what: str
    limit_s: float
    wall_s: float
    cpu_s: float
    samples_s: tuple[float, ...]


def decode_steps(model: str, config: dict[str, Any], repetitions: int) -> list[tuple[float, float]]:
    """(wall, CPU) seconds of single decode steps of a model on the virtual GPU, after warm-up."""
    with load(str(find(model)[0]), config, VirtualDevice(PROFILE, "meta"), load_format="meta") as engine:
        decoding = engine.start([[0] * PROMPT], PROMPT + WARM_STEPS + repetitions)
        for _ in range(WARM_STEPS):
            engine.decode_step(decoding)
        return [_timed(lambda: engine.decode_step(decoding)) for _ in range(repetitions)]


def commands(words: Sequence[str], repetitions: int) -> list[tuple[float, float]]:
    """(wall, CPU) seconds of a command, from its start to its end.

    Raises:
        RuntimeError: it failed.
    """
    return [_timed(lambda: _run(words)) for _ in range(repetitions)]


def _run(words: Sequence[str]) -> None:
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"python -m {' '.join(words)} failed: {done.stderr.strip()[-200:]}")


def _timed(action: Callable[[], object]) -> tuple[float, float]:
    cpu_s, wall_s = _cpu_s(), time.perf_counter()
    action()
    return time.perf_counter() - wall_s, _cpu_s() - cpu_s


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(only: Sequence[str], repetitions: int) -> list[Wait]:
    """Time what `only` names, in the table's order."""
    waits = []
    for name in tqdm(only, desc="simulation", disable=None):
        what, limit_s, take = WAITS[name]
        samples = take(repetitions)
        walls, cpus = zip(*samples, strict=True)
        waits.append(Wait(what, limit_s, statistics.median(walls), statistics.median(cpus), walls))
    return waits


def _sweep(repetitions: int) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        return commands([*SWEEP, *SIXTY, "--plot", str(Path(folder, "heat.png"))], repetitions)


WAITS: dict[str, tuple[str, float, Callable[[int], list[tuple[float, float]]]]] = {
    "70b": ("a decode step of llama-3.1-70b, half offloaded", 1, lambda n: decode_steps("llama-3.1-70b", HALF, n)),
    "235b": ("a decode step of qwen3-235b-a22b, half offloaded", 3, lambda n: decode_steps("qwen3-235b-a22b", HALF, n)),
    "sweep": ("`bench step` of llama-3.1-8b, 60 configurations", 120, _sweep),
    "plan": ("`offload plan` of llama-3.1-70b for 24 GiB", 30, lambda n: commands(SEARCH, n)),
}


def table(waits: Sequence[Wait]) -> str:
    """What was waited for, in seconds."""
    lines = ["| what | wall s | CPU s | promised s |", "|---|--:|--:|--:|"]
    lines += [f"| {wait.what} | {wait.wall_s:.3g} | {wait.cpu_s:.3g} | {wait.limit_s:g} |" for wait in waits]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run `python -m bench simulation`; returns the exit code."""
    options = parser("simulation", __doc__)
    options.add_argument("--only", default=",".join(WAITS), metavar="NAME[,NAME...]", help=f"of {', '.join(WAITS)}")
    options.add_argument("-r", "--repetitions", type=positive, default=3, help="default 3")
    options.add_argument("-o", "--output", choices=("md", "json"), default="md", help="form of the result (default md)")
    options.add_argument("--save", metavar="FILE", type=Path, help="also write a result document (JSON) to FILE")
    args = options.parse_args(argv)
    only = args.only.split(",")
    if unknown := sorted({*only} - {*WAITS}):
        raise OffloadConfigError(f"--only {', '.join(unknown)[:80]} is not known: choose of {', '.join(WAITS)}")
    waits = measure(only, args.repetitions)
    rows = [asdict(wait) for wait in waits]
    if args.output == "json":
        print(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    else:
        print(f"# How long simulating takes\n\nMachine: {describe(machine())}.\n\n{table(waits)}")
    if args.save:
        save(document("simulation", argv, rows), args.save)
    return 0
