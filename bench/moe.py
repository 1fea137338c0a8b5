"""Experts on the host, read in place or copied ahead: which is faster at which batch?

uva reads the routed experts, prefetch copies them all. Both configurations keep the experts of every layer on the host.
One token uses k of E experts, so uva moves k/E of the bytes that prefetch moves; with more sequences more experts are
in use, until both move the same. Decode is timed at every batch for both, and the first batch at which prefetch is as
fast is looked for between them. Without --device virtual:NAME and --load-format meta the weights are really there:
choose a model that fits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench import arguments
from bench.arms import default_budgets
from bench.judge import Judge
from bench.machine import portable
from bench.outcome import Outcome, notes_of, picture_of, title_of
from bench.plot import COLOURS, PANEL_INCHES, save_figure
from bench.ranges import parse_ints
from bench.rows import Row
from bench.subject import Subject, subject_of
from bench.sweep import Sizes, sweep
from offload.config import OffloadConfig
from offload.errors import OffloadConfigError
from offload.plan import plan
from offload.suggest import routed_experts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = "1,2,4,8,16,32,64"
EXPERTS = ["experts"]


def configs_of(subject: Subject, step: int) -> dict[str, OffloadConfig]:
    """All experts on the host, by uva and by prefetch.

    Raises:
        OffloadConfigError: the model has no experts.
    """
    if routed_experts(subject.described) is None:
        raise OffloadConfigError(f"{subject.name} has no experts: choose a mixture-of-experts model")
    prefetch = OffloadConfig.of(
        {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": step, "offload_params": EXPERTS}}
    )
    planned = plan(subject.specs, prefetch)
    planned.require_offload()
    everything = default_budgets(planned.offloaded_bytes, steps=1)[-1]
    uva = OffloadConfig.of({"uva": {"cpu_offload_gb": everything, "cpu_offload_params": EXPERTS}})
    return {"uva": uva, "prefetch": prefetch}


def meeting_batch(batches: Sequence[int], is_caught: Callable[[int], bool]) -> int | None:
    """The first batch at which prefetch is as fast as uva, by bisection between the given ones.

    Args:
        batches: ascending; looked at first.
        is_caught: whether prefetch is at least as fast at a batch.

    Returns:
        The batch, or None if it is above all of them.
    """
    caught = next((index for index, batch in enumerate(batches) if is_caught(batch)), None)
    if caught is None:
        return None
    low, high = (batches[caught - 1] if caught else 0), batches[caught]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_caught(middle) else (middle, high)
    return high


class Race:
    """Decode of both configurations at any batch, each measured once.

    Args:
        subject: the model and its device.
        configs: by backend.
        steps, repetitions: what is timed at each batch.
    """

    def __init__(self, subject: Subject, configs: dict[str, OffloadConfig], steps: int, repetitions: int) -> None:
        self._subject, self._configs = subject, configs
        self._steps, self._repetitions = steps, repetitions
        self._judge = Judge()
        self._rows: dict[tuple[str, int], Row] = {}

    def rows(self, batches: Sequence[int]) -> Iterator[Row]:
        """Measure both at these batches; a model is loaded once per configuration."""
        sizes = Sizes((), (self._steps,), batches, self._repetitions)
        for backend, config in self._configs.items():
            for row in sweep(self._subject, [config], sizes, self._judge):
                self._rows[backend, row.batch] = row
                yield row

    def is_caught(self, batch: int) -> bool:
        """Whether prefetch is at least as fast as uva at a batch.

        Raises:
            OffloadConfigError: one of them does not fit.
        """
        if ("prefetch", batch) not in self._rows:
            list(self.rows([batch]))
        uva, prefetch = (self._rows.get((backend, batch)) for backend in ("uva", "prefetch"))
        for row in (uva, prefetch):
            if row is None or row.step_s is None:
                raise OffloadConfigError(f"batch {batch} was not timed for both: {row.note if row else 'not loaded'}")
        return prefetch.step_s <= uva.step_s


def figure_of(rows: Sequence[Row], title: str, meeting: int | None) -> Figure:
    """Tokens/s and GiB over the bus per step against the batch, one line per backend."""
    from matplotlib.figure import Figure

    width, height = PANEL_INCHES
    figure = Figure(figsize=(2 * width, height), layout="constrained")
    speed, traffic = figure.subplots(1, 2)
    for backend in ("uva", "prefetch"):
        own = sorted((row for row in rows if row.backend == backend and row.step_s), key=lambda row: row.batch)
        batches, look = [row.batch for row in own], {"marker": "o", "color": COLOURS[backend], "label": backend}
        speed.plot(batches, [row.tokens_per_s for row in own], **look)
        if all(row.bound_s for row in own):
            bound = [row.batch / row.bound_s for row in own]
            speed.plot(batches, bound, "--", color=COLOURS[backend], alpha=0.6, label=f"bound, {backend}")
        if all(row.bus_bytes_per_step for row in own):
            traffic.plot(batches, [row.bus_bytes_per_step / 2**30 for row in own], **look)
    for axis, name in ((speed, "tokens/s"), (traffic, "GiB over the bus per decode step")):
        axis.set(xlabel="sequences at a time", ylabel=name, xscale="log")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if meeting is not None:
            axis.axvline(meeting, color="#888888", linestyle=":", label=f"prefetch catches up at {meeting}")
        axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        OffloadConfigError: it is wrong.
    """
    parser = arguments.parser("moe", __doc__)
    arguments.add_model(parser)
    parser.add_argument("-n", "--n-gen", type=arguments.positive, default=8, help="decode steps (default 8)")
    parser.add_argument("-b", "--batch", type=parse_ints, default=BATCHES, help=f"batches (default {BATCHES})")
    parser.add_argument("-r", "--repetitions", type=arguments.positive, help="default 3; 1 where times are simulated")
    parser.add_argument("--step", type=arguments.positive, default=2, help="prefetch step (default 2)")
    arguments.add_output(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the picture (default: moe-MODEL-DEVICE.png)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run `python -m bench moe`; returns the exit code."""
    args = parse(argv)
    subject = subject_of(args)
    configs = configs_of(subject, args.step)
    device = subject.open_device()
    title, notes = title_of(subject, device), notes_of(device, None)
    picture = args.plot or picture_of("moe", subject, device)
    repetitions = args.repetitions or (1 if device.simulated else 3)
    device.close()
    batches = sorted(set(args.batch))
    outcome = Outcome("moe", argv, title, notes)
    race = Race(subject, configs, args.n_gen, repetitions)
    outcome.collect(race.rows(batches), len(configs) * len(batches), args.output)
    finding: dict[str, int | None] = {}
    if not outcome.is_interrupted:
        finding["meeting_batch"] = meeting_batch(batches, race.is_caught)
    outcome.print(args.output)
    print(finding_text(batches, finding), file=sys.stdout if args.output == "md" else sys.stderr)
    save_figure(figure_of(outcome.rows, title, finding.get("meeting_batch")), picture)
    print(f"picture {portable(str(picture))}", file=sys.stderr)
    if args.save:
        outcome.save(args.save, **finding)
    return 130 if outcome.is_interrupted else 0


def finding_text(batches: Sequence[int], finding: dict[str, int | None]) -> str:
    """What was found, as a sentence."""
    if "meeting_batch" not in finding:
        return "\nInterrupted before the batch was found at which prefetch catches up."
    batch = finding["meeting_batch"]
    if batch is None:
        return f"\nuva is faster at every batch up to {batches[-1]}."
    return f"\nPrefetch is as fast as uva from {batch} sequences on."
