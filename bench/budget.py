"""What does a budget cost: throughput against offloaded GiB, for any number of configurations.

Every configuration is loaded, its tokens are compared with those of the run without offload, and prompt processing and
decode are timed. The run without offload always comes first; without --cpu-offload-gb and --offload-config the budgets
go from there to everything in five steps. What does not fit is a row that says so, and the sweep goes on. Ctrl-C keeps
the rows that are done.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import arguments
from bench.arms import NO_OFFLOAD, budget, default_budgets, distinct, equal_memory, offloadable_bytes
from bench.judge import Judge
from bench.outcome import Outcome, notes_of, picture_of, title_of
from bench.ranges import parse_floats
from bench.subject import Subject, require_real, subject_of
from bench.sweep import sizes_of, sweep
from offload.config import OffloadConfig
from offload.plan import plan

EXIT_INTERRUPTED = 130


def configs_of(args: argparse.Namespace, subject: Subject) -> list[OffloadConfig]:
    """The configurations that the options ask for, each once, all of them checked against the model.

    Raises:
        OffloadConfigError: one is wrong, or would offload nothing.
    """
    pasted = [OffloadConfig.from_argument(text) for text in args.offload_config or []]
    budgets = args.cpu_offload_gb
    if budgets is None and not pasted:
        budgets = default_budgets(offloadable_bytes(subject.specs))
    # The run without offload always comes first: it is what the others' tokens and speed are compared with.
    configs = [NO_OFFLOAD, *(budget(gib) for gib in budgets or ())]
    for config in pasted:
        configs.append(config)
        opponent = equal_memory(config, subject.specs) if args.equal_memory else None
        configs += [opponent] if opponent else []
    for config in configs:
        plan(subject.specs, config).require_offload()
    return distinct(configs)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        OffloadConfigError: it is wrong.
    """
    parser = arguments.parser("budget", __doc__)
    arguments.add_model(parser)
    parser.add_argument(
        "--cpu-offload-gb",
        type=parse_floats,
        metavar="GIB[,GIB...]|FIRST-LAST+STEP",
        help="uva budgets (default: 0 to everything in 5 steps)",
    )
    parser.add_argument(
        "--offload-config",
        action="append",
        metavar="JSON|@FILE",
        help="a configuration; may be given several times",
    )
    parser.add_argument(
        "--equal-memory",
        action="store_true",
        help="after each prefetch configuration, also the uva budget that frees the same device memory",
    )
    parser.add_argument("--graph", action="store_true", help="replay captured decode steps (not on a CPU)")
    arguments.add_profile(parser)
    arguments.add_sizes(parser)
    arguments.add_output(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the picture (default: budget-MODEL-DEVICE.png)")
    args = parser.parse_args(argv)
    arguments.require_a_test(args)
    return args


def main(argv: Sequence[str]) -> int:
    """Run `python -m bench budget`; returns the exit code."""
    args = parse(argv)
    subject = subject_of(args)
    configs = configs_of(args, subject)
    device = subject.open_device()
    require_real(device, args.profile)
    sizes = sizes_of(args, device)
    outcome = Outcome("budget", argv, title_of(subject, device), notes_of(device, args.profile))
    picture = args.plot or picture_of("budget", subject, device)
    device.close()
    judge = Judge()
    rows = sweep(subject, configs, sizes, judge, args.profile)
    outcome.collect(rows, len(configs) * len(sizes.tests), args.output)
    outcome.print(args.output)
    if args.output == "md":
        print(f"\n{judge.summary()}")
    outcome.draw(picture)
    if args.save:
        outcome.save(args.save, tokens=judge.summary())
    return EXIT_INTERRUPTED if outcome.is_interrupted else judge.exit_code()
