"""How fast is a decode step: ours against another library's `generate`, and what offloading everything adds to it.

Tokens are interleaved: for every token of the other library each of our arms makes one, so that whatever the machine
does meanwhile happens to all. The arms are our engine without offload, with everything offloaded by uva and by
prefetch, the matrix-vector products of a step alone (no step can be faster), by our layers and by torch's, and a plain
copy of the bytes that prefetch moves. Against accelerate, which keeps every weight on the host too, transformers' own
model runs beside it, plain and offloaded in place by `offload_`. Times are medians per token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from tqdm import tqdm

from bench import arguments
from bench.arms import NO_OFFLOAD, budget, default_budgets, offloadable_bytes, pasteable
from bench.machine import document, machine, save
from bench.measure import prompts
from bench.others import LIBRARIES, InPlace
from bench.rows import Row, render
from bench.subject import Subject, subject_of
from offload.config import OffloadConfig
from offload.device import Device
from offload.engine import Engine
from offload.errors import OffloadConfigError
from offload.report import MemoryReport

OURS, UVA, PREFETCH, COPY = "none", "uva", "prefetch", "plain copy"
PRODUCTS, TORCH_PRODUCTS = "products alone", "torch's products alone"
PLAIN, IN_PLACE = "transformers plain", "transformers offload_"
LEAST_SPEEDUP = 1.2
LEAST_UVA_SHARE = 0.95

Step = Callable[[], Any]


@dataclass(frozen=True)
class Target:
    """A figure to reach and what was reached.

    Attributes:
        name, unit: what it is.
        value: as measured.
        limit: at least, or with `is_ceiling` at most, this.
    """

    name: str
    value: float
    limit: float
    unit: str
    is_ceiling: bool = False

    @property
    def is_reached(self) -> bool:
        """Whether the value is on the right side of its limit."""
        return self.value <= self.limit if self.is_ceiling else self.value >= self.limit

    def __str__(self) -> str:
        word, side = ("reached" if self.is_reached else "MISSED"), ("at most" if self.is_ceiling else "at least")
        return f"{self.name}: {self.value:.3g}{self.unit}, {side} {self.limit:.3g}{self.unit} ({word})"


def configurations(subject: Subject) -> dict[str, OffloadConfig]:
    """Our arms: nothing offloaded, and everything by either backend, through one slot."""
    return {
        OURS: NO_OFFLOAD,
        UVA: budget(default_budgets(offloadable_bytes(subject.specs))[-1]),
        PREFETCH: OffloadConfig.of({"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 1}}),
    }


def matrix_products(model: nn.Module, by_torch: bool = False) -> Step:
    """Every matrix of one decode step times one vector, in the model's order and dtype, and nothing else.

    Args:
        model: whose linear layers are called.
        by_torch: call `F.linear` on their weights instead.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    vectors = [torch.randn(1, each.in_features, dtype=each.weight.dtype, device=each.weight.device) for each in layers]
    products = [partial(linear, weight=each.weight, bias=each.bias) if by_torch else each for each in layers]

    @torch.inference_mode()
    def step() -> None:
        for product, vector in zip(products, vectors, strict=True):
            product(vector)

    return step


def plain_copy(nbytes: int, device: torch.device) -> Step:
    """One copy of so many bytes from host memory to the device."""
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target: Tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return lambda: target.copy_(source, non_blocking=True)


class Arm:
    """One of our engines with a running batch, one token at a time."""

    def __init__(self, engine: Engine, text: Sequence[int], steps: int) -> None:
        self._engine = engine
        self._decoding = engine.start([text], len(text) + steps + 1)
        self.tokens = list(self._decoding.last)

    def __call__(self) -> None:
        self.tokens += self._engine.decode_step(self._decoding)


class Stopwatch:
    """Times of every arm, each step after the device has finished it."""

    def __init__(self, steps: dict[str, Step], synchronise: Callable[[], None]) -> None:
        self._steps, self._synchronise = steps, synchronise
        self.samples_s: dict[str, list[float]] = {}

    def round(self) -> None:
        """One step of every arm."""
        for name, step in self._steps.items():
            begin = time.perf_counter()
            step()
            self._synchronise()
            self.note(name, time.perf_counter() - begin)

    def note(self, name: str, seconds: float) -> None:
        """Keep a time that was taken elsewhere."""
        self.samples_s.setdefault(name, []).append(seconds)


@dataclass(frozen=True)
class Result:
    """What one run of all arms gave.

    Attributes:
        samples_s: times per token, by arm.
        memory: of our engines, by arm.
        alike, compared: tokens that our engine without offload and the other library chose alike, of how many.
        device: where it ran.
    """

    samples_s: dict[str, list[float]]
    memory: dict[str, MemoryReport | None]
    alike: int
    compared: int
    device: str

    def median_s(self, arm: str) -> float:
        """Median time of one token of an arm."""
        return statistics.median(self.samples_s[arm])


def interleave(subject: Subject, library: str, prompt: int, tokens: int, rounds: int) -> Result:
    """Run every arm, tokens interleaved, `rounds` times after one that warms up."""
    samples: dict[str, list[float]] = {}
    alike = 0
    with ExitStack() as owned:
        device = subject.open_device()
        owned.callback(device.close)
        engines = {
            name: owned.enter_context(subject.load(config, device)) for name, config in configurations(subject).items()
        }
        other = LIBRARIES[library](subject, device)
        (text,) = prompts(1, prompt, engines[OURS].parts.vocabulary)
        alone = {
            PRODUCTS: matrix_products(engines[OURS].parts.model),
            TORCH_PRODUCTS: matrix_products(engines[OURS].parts.model, by_torch=True),
            COPY: plain_copy(engines[PREFETCH].report().offloaded_bytes, device.torch_device),
        }
        foreign = in_place(subject, device) if library == "accelerate" else {}
        for each in foreign.values():
            owned.callback(each.close)
        for index in tqdm(range(rounds + 1), desc="generate", unit="round", disable=None):
            arms = {name: Arm(engine, text, tokens) for name, engine in engines.items()}
            for each in foreign.values():
                each.start(text)
            watch = Stopwatch({**arms, **foreign, **alone}, device.synchronise)
            theirs = other.generate(text, tokens, watch)
            if index:
                alike += agreeing(arms[OURS].tokens, theirs)
                for name, values in watch.samples_s.items():
                    samples.setdefault(name, []).extend(values)
        memory = {name: each.report() for name, each in {**engines, **foreign}.items()}
        return Result(samples, memory, alike, rounds * (tokens + 1), device.name)


def in_place(subject: Subject, device: Device) -> dict[str, InPlace]:
    """transformers' own model, as it is and with every layer's weights on the host."""
    return {
        PLAIN: InPlace(subject, device, None),
        IN_PLACE: InPlace(subject, device, configurations(subject)[UVA]),
    }


def agreeing(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens are equal before the first that is not."""
    pairs = list(zip(mine, theirs, strict=True))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


def targets_of(result: Result, library: str) -> list[Target]:
    """The figures to reach: against another library only for the library that keeps its weights on the device."""
    ours, copy = result.median_s(OURS), result.median_s(COPY)
    found = [
        Target("uva, share of our own speed", ours / result.median_s(UVA), LEAST_UVA_SHARE, ""),
        Target("prefetch, ms a token", result.median_s(PREFETCH) * 1e3, (ours + copy) * 1e3, " ms", is_ceiling=True),
    ]
    if library == "transformers":
        speedup = result.median_s(library) / ours
        found.insert(0, Target("times as fast as transformers", speedup, LEAST_SPEEDUP, ""))
    if library == "accelerate":
        share = result.median_s(PLAIN) / result.median_s(IN_PLACE)
        found.append(Target("offload_, share of the plain model's speed", share, LEAST_UVA_SHARE, ""))
    return found


def rows_of(result: Result, subject: Subject, tokens: int) -> list[Row]:
    """One row per arm; those that are not ours have no configuration."""
    configs: dict[str, OffloadConfig] = configurations(subject)
    configs[IN_PLACE] = configs[UVA]
    rows = []
    for name, samples in result.samples_s.items():
        step_s, memory = statistics.median(samples), result.memory.get(name)
        moved = memory.offloaded_bytes if memory else None
        rows.append(
            Row(
                backend=name,
                config=pasteable(configs[name]) if name in configs else None,
                model=subject.name,
                device=result.device,
                simulated=False,
                load_format=subject.load_format,
                batch=1,
                test=f"tg{tokens}",
                tokens_per_s=1 / step_s,
                step_s=step_s,
                offloaded_bytes=moved,
                device_bytes=memory.device_bytes if memory else None,
                slot_bytes=memory.slot_bytes if memory else None,
                bus_bytes_per_step=moved,
                bus_bytes_per_s=moved / step_s if moved is not None else None,
                samples_s=tuple(samples),
            )
        )
    return rows


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        OffloadConfigError: it is wrong.
    """
    parser = arguments.parser("generate", __doc__)
    parser.add_argument("--against", choices=LIBRARIES, required=True, help="the other library")
    arguments.add_model(parser)
    parser.add_argument("-p", "--n-prompt", type=arguments.positive, default=32, help="prompt tokens (default 32)")
    parser.add_argument("-n", "--n-gen", type=arguments.positive, default=64, help="tokens a round (default 64)")
    parser.add_argument("-r", "--repetitions", type=arguments.positive, default=3, help="rounds (default 3)")
    arguments.add_output(parser)
    args = parser.parse_args(argv)
    if not args.model or args.load_format not in (None, "safetensors"):
        raise OffloadConfigError("both libraries must read the same weights: give --model DIR with safetensors")
    if (args.device or "").startswith("virtual:"):
        raise OffloadConfigError(f"{args.device} has simulated times, which no other library has: choose cpu or cuda")
    return args


def main(argv: Sequence[str]) -> int:
    """Run `python -m bench generate`; returns the exit code."""
    args = parse(argv)
    subject = subject_of(args)
    result = interleave(subject, args.against, args.n_prompt, args.n_gen, args.repetitions)
    rows, targets = rows_of(result, subject, args.n_gen), targets_of(result, args.against)
    products, by_torch = result.median_s(PRODUCTS), result.median_s(TORCH_PRODUCTS)
    facts = [
        *map(str, targets),
        f"matrix-vector products alone: {products / result.median_s(OURS):.0%} of our step",
        f"the same products by F.linear: {by_torch / products:.2f} times as long",
        f"tokens chosen alike before the first difference: {result.alike} of {result.compared}",
    ]
    title = f"{subject.name} on {result.device}: one token, everything interleaved, medians"
    print(*render(args.output, rows, machine(), title), sep="\n")
    if args.output == "md":
        print("", *(f"- {fact}" for fact in facts), sep="\n")
    if args.save:
        more = {"targets": [{**asdict(target), "is_reached": target.is_reached} for target in targets], "facts": facts}
        save(document("generate", argv, [row.as_dict() for row in rows], title=title, **more), args.save)
    return 0
