"""How long does the virtual GPU itself take: a decode step on meta, a sweep, a search; in real seconds.

The models are far larger than the machine, so nothing is computed; what is timed is Python. A decode step is timed
after a warm-up, which fills the memory of shapes; a sweep and a search are timed whole, from a fresh process on.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tqdm import tqdm

from bench.arguments import parser, positive
from bench.machine import REPOSITORY, describe, document, machine, save
from offload.engine import load
from offload.errors import OffloadConfigWarning
from offload.model_configs import find
from offload.virtual import VirtualDevice

PROFILE = "h200-pcie5"
HALF = {"prefetch": {"offload_group_size": 2, "offload_prefetch_step": 2}}
EXPERTS = {"uva": {"cpu_offload_gb": 2.0**20, "cpu_offload_params": ["experts"]}}
SWEEP = (
    f"bench step --model-config llama-3.1-8b --load-format meta --device virtual:{PROFILE} "
    "--offload-group-size 2,3,4,8,16 --offload-num-in-group 1-3 --offload-prefetch-step 1-5 -o jsonl"
)
SEARCH = "offload plan --model-config llama-3.1-70b --device-memory 24GiB --device virtual:rtx4090-pcie4 --json"


@dataclass(frozen=True)
class Figure:
    """What was timed.

    Attributes:
        name: what it is.
        samples_s: real seconds.
        limit_s: what it is to stay below.
        configurations: how many a sweep ran; 0 where there is no sweep.
    """

    name: str
    samples_s: tuple[float, ...]
    limit_s: float
    configurations: int = 0

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)


def decode_steps(name: str, config: dict, steps: int) -> tuple[float, ...]:
    """Real seconds of each of `steps` decode steps of a shipped model on meta, after two that warm up."""
    path, _ = find(name)
    device = VirtualDevice(PROFILE, "meta")
    with load(str(path), config, device, load_format="meta") as engine:
        decoding = engine.start([[0] * 16], 16 + steps + 2)
        for _ in range(2):
            engine.decode_step(decoding)
        samples = []
        for _ in range(steps):
            begin = time.perf_counter()
            engine.decode_step(decoding)
            samples.append(time.perf_counter() - begin)
    return tuple(samples)


def whole(words: str, repetitions: int) -> tuple[tuple[float, ...], str]:
    """Real seconds of a command in a fresh process, and what it printed last.

    Raises:
        RuntimeError: it failed.
    """
    samples = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        run = subprocess.run(
            [sys.executable, "-m", *words.split()], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        samples.append(time.perf_counter() - begin)
        if run.returncode:
            raise RuntimeError(f"python -m {words} failed: {run.stderr.strip().splitlines()[-1]}")
    return tuple(samples), run.stdout


def measure(steps: int, repetitions: int) -> list[Figure]:
    """Time everything."""
    jobs = [
        lambda: Figure("decode step of llama-3.1-70b", decode_steps("llama-3.1-70b", HALF, steps), 1.0),
        lambda: Figure("decode step of qwen3-235b-a22b", decode_steps("qwen3-235b-a22b", EXPERTS, steps), 3.0),
        lambda: _sweep(repetitions),
        lambda: Figure("search for llama-3.1-70b", whole(SEARCH, repetitions)[0], 30.0),
    ]
    return [job() for job in tqdm(jobs, desc="simulation", unit="figure", disable=None)]


def _sweep(repetitions: int) -> Figure:
    samples, printed = whole(SWEEP, repetitions)
    return Figure("sweep of llama-3.1-8b", samples, 120.0, len(printed.splitlines()))


def main(argv: Sequence[str]) -> int:
    """Run `python -m bench simulation`; returns the exit code."""
    options = parser("simulation", __doc__)
    options.add_argument("-n", "--n-gen", type=positive, default=7, help="decode steps (default 7)")
    options.add_argument("-r", "--repetitions", type=positive, default=1, help="of sweep and search (default 1)")
    options.add_argument("--save", metavar="FILE", help="write a result document (JSON) to FILE")
    args = options.parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadConfigWarning)
        found = measure(args.n_gen, args.repetitions)
    print("# The virtual GPU in real seconds", "", f"Machine: {describe(machine())}.", "", sep="\n")
    print("| what | median s | min s | max s | at most s |", "|---|--:|--:|--:|--:|", sep="\n")
    for each in found:
        name = f"{each.name}, {each.configurations} rows" if each.configurations else each.name
        samples = f"{each.median_s:.3f} | {min(each.samples_s):.3f} | {max(each.samples_s):.3f}"
        print(f"| {name} | {samples} | {each.limit_s:g} |")
    if args.save:
        commands = {"sweep": f"python -m {SWEEP}", "search": f"python -m {SEARCH}"}
        rows = [{**asdict(each), "median_s": each.median_s} for each in found]
        save(document("simulation", argv, rows, commands=commands), args.save)
    return 0
