"""Which prefetch step: groups, layers per group and steps swept; throughput, stall and slot memory of each.

Every option takes a list or a range, and the cross product runs; combinations that are no configuration, or that free
nothing, are left out with the reason. Below the table stand the configurations that no other beats in both speed and
device memory, fastest first, or, with --device-memory, the fastest that fits each amount: as JSON to paste. With
--equal-memory each configuration is followed by the uva budget that frees the same device memory, which is the slots'
bytes spent on more resident weights. On a virtual GPU with --load-format meta this needs neither GPU nor weights.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import arguments
from bench.arms import distinct, equal_memory
from bench.heat import heat_figure
from bench.judge import Judge
from bench.machine import GIB, portable
from bench.outcome import Outcome, notes_of, picture_of, title_of
from bench.plot import save_figure
from bench.ranges import parse_floats, parse_ints
from bench.rows import NOT_LOADED, Row, short_config
from bench.subject import Subject, require_real, subject_of
from bench.sweep import sizes_of, sweep
from offload.config import OffloadConfig
from offload.errors import OffloadConfigError
from offload.plan import plan
from offload.text import ranges

EXIT_INTERRUPTED = 130
NOTHING_FREED = "the slots take as much as is offloaded, nothing is freed"


def configs_of(args: argparse.Namespace, subject: Subject) -> tuple[list[OffloadConfig], list[str]]:
    """The configurations of the cross product that can be run, and why the others cannot.

    Raises:
        OffloadConfigError: none can.
    """
    configs: list[OffloadConfig] = []
    skipped: dict[tuple[str, str], list[int]] = {}
    product = itertools.product(args.offload_group_size, args.offload_num_in_group, args.offload_prefetch_step)
    for group, count, step in product:
        fields = {"offload_group_size": group, "offload_num_in_group": count, "offload_prefetch_step": step}
        if args.offload_params:
            fields["offload_params"] = args.offload_params
        try:
            config = OffloadConfig.of({"offload_backend": "prefetch", "prefetch": fields})
            made = plan(subject.specs, config)
            made.require_offload()
        except OffloadConfigError as error:
            skipped.setdefault((f"{count} of {group}", str(error)), []).append(step)
            continue
        if made.freed_bytes <= 0:
            skipped.setdefault((f"{count} of {group}", NOTHING_FREED), []).append(step)
            continue
        configs.append(config)
        opponent = equal_memory(config, subject.specs) if args.equal_memory else None
        configs += [opponent] if opponent else []
    reasons = [f"{what}, step {ranges(sorted(steps))}: {why}" for (what, why), steps in skipped.items()]
    if not configs:
        raise OffloadConfigError(f"no combination can be run: {'; '.join(reasons[:3])}")
    return distinct(configs), reasons


def best_rows(rows: Sequence[Row], memories_bytes: Sequence[float]) -> Iterator[tuple[str, Row]]:
    """(what it is best at, row): the fastest that fits each amount, or all that no other row beats in both.

    Args:
        rows: of one test.
        memories_bytes: amounts of device memory; empty for the rows that are not beaten.
    """
    timed = [row for row in rows if row.tokens_per_s is not None and row.device_bytes is not None]
    if memories_bytes:
        for amount in memories_bytes:
            fitting = [row for row in timed if row.device_bytes <= amount]
            if fitting:
                yield f"at most {amount / GIB:.4g} GiB", max(fitting, key=lambda row: row.tokens_per_s)
        return
    least = float("inf")
    for row in sorted(timed, key=lambda row: (-row.tokens_per_s, row.device_bytes)):
        if row.device_bytes < least:
            least = row.device_bytes
            yield f"{row.device_bytes / GIB:.4g} GiB", row


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        OffloadConfigError: it is wrong.
    """
    parser = arguments.parser("step", __doc__)
    arguments.add_model(parser)
    many = {"type": parse_ints, "metavar": "N[,N...]|FIRST-LAST[+STEP]"}
    parser.add_argument("--offload-group-size", default="2,4,8", help="layers per group (default 2,4,8)", **many)
    parser.add_argument("--offload-num-in-group", default="1", help="of which offloaded (default 1)", **many)
    parser.add_argument("--offload-prefetch-step", default="1-4", help="layers ahead (default 1-4)", **many)
    parser.add_argument("--offload-params", action="append", metavar="NAME", help="offload only these parameters")
    parser.add_argument("--equal-memory", action="store_true", help="after each, the uva budget of equal memory")
    parser.add_argument(
        "--device-memory", type=parse_floats, default=(), metavar="GIB[,GIB...]", help="print the best for each amount"
    )
    parser.add_argument("--graph", action="store_true", help="replay captured decode steps (not on a CPU)")
    arguments.add_profile(parser)
    arguments.add_sizes(parser, prompt="0", decode="4")
    arguments.add_output(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the heat maps (default: step-MODEL-DEVICE.png)")
    args = parser.parse_args(argv)
    arguments.require_a_test(args)
    return args


def main(argv: Sequence[str]) -> int:
    """Run `python -m bench step`; returns the exit code."""
    args = parse(argv)
    subject = subject_of(args)
    configs, skipped = configs_of(args, subject)
    device = subject.open_device()
    require_real(device, args.profile)
    sizes = sizes_of(args, device)
    notes = [*notes_of(device, args.profile), *(f"Left out: {text}" for text in skipped)]
    outcome = Outcome("step", argv, title_of(subject, device), notes)
    picture = args.plot or picture_of("step", subject, device)
    device.close()
    judge = Judge()
    outcome.collect(sweep(subject, configs, sizes, judge, args.profile), len(configs) * len(sizes.tests), args.output)
    outcome.print(args.output)
    if args.output == "md":
        _print_best(outcome.rows, [amount * GIB for amount in args.device_memory])
        print(f"\n{judge.summary()}")
    _draw(outcome, picture)
    if args.save:
        outcome.save(args.save, tokens=judge.summary())
    return EXIT_INTERRUPTED if outcome.is_interrupted else judge.exit_code()


def _by_test(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """The rows of each test and batch; those that did not come to a test are in none."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row.test != NOT_LOADED:
            found.setdefault((row.test, row.batch), []).append(row)
    return found


def _print_best(rows: Sequence[Row], memories_bytes: Sequence[float]) -> None:
    for (test, batch), alike in _by_test(rows).items():
        for place, row in best_rows(alike, memories_bytes):
            rate = f"{row.tokens_per_s:.4g} tok/s, {short_config(row.config)}"
            print(f"\nbest {test}, batch {batch}, {place}: {rate}\n--offload-config '{row.config}'")


def _draw(outcome: Outcome, path: Path) -> None:
    """One picture per test and batch; the first has the path itself."""
    for index, ((test, batch), alike) in enumerate(_by_test(outcome.rows).items()):
        target = path if index == 0 else path.with_stem(f"{path.stem}-{test}-{batch}")
        save_figure(heat_figure(alike, f"{outcome.title}, {test}, batch {batch}"), target)
        print(f"picture {portable(str(target))}", file=sys.stderr)
