"""Options that benches share, so that a model, a device or an output form is named the same way in all of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from bench.ranges import parse_ints
from bench.rows import FORMATS
from offload.errors import OffloadConfigError

DTYPES = ("bfloat16", "float16", "float32")
LOAD_FORMATS = ("safetensors", "dummy", "meta")


class Parser(argparse.ArgumentParser):
    """argparse whose complaint is raised, and so is printed in the one form and with the one code of usage errors."""

    def error(self, message: str) -> NoReturn:
        words = (word if len(word) <= 80 else f"{word[:77]}..." for word in message.split())
        raise OffloadConfigError(f"{' '.join(words)} (see {self.prog} --help)")


def parser(name: str, doc: str) -> Parser:
    """A parser for `python -m bench name` with the bench's docstring as its help."""
    first_line, _, rest = doc.partition("\n")
    return Parser(
        prog=f"python -m bench {name}",
        description=first_line,
        epilog=rest.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_model(to: argparse.ArgumentParser) -> None:
    """`--model DIR | --model-config NAME|FILE`, `--load-format`, `--device`, `--dtype`."""
    which = to.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="DIR", help="folder with config.json and safetensors")
    which.add_argument("--model-config", metavar="NAME|FILE", help="a shipped configuration, or a config.json")
    to.add_argument(
        "--load-format",
        choices=LOAD_FORMATS,
        help="safetensors (default with --model), dummy: random weights (default with --model-config), "
        "meta: no weights, virtual devices only",
    )
    to.add_argument("--device", help="cuda, cuda:1, cpu or virtual:NAME (default: cuda if there is one, else cpu)")
    to.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the model's)")


def add_profile(to: argparse.ArgumentParser) -> None:
    """`--profile NAME|FILE`."""
    text = "rates for the bound of a real GPU; with --device virtual, the GPU that is simulated"
    to.add_argument("--profile", metavar="NAME|FILE", help=text)


def add_sizes(to: argparse.ArgumentParser, prompt: str = "512", decode: str = "32") -> None:
    """`-p`, `-n`, `-b` (lists and ranges) and `-r`, as llama-bench has them; 0 skips that test."""
    to.add_argument("-p", "--n-prompt", type=parse_ints, default=prompt, help=f"prompt tokens (default {prompt})")
    to.add_argument("-n", "--n-gen", type=parse_ints, default=decode, help=f"decode steps (default {decode})")
    to.add_argument("-b", "--batch", type=parse_ints, default="1", help="sequences at a time (default 1)")
    to.add_argument("-r", "--repetitions", type=positive, help="default 3; 1 where times are simulated")


def require_a_test(args: argparse.Namespace) -> None:
    """Refuse sizes that leave nothing to measure.

    Raises:
        OffloadConfigError: every length is 0.
    """
    if not any(args.n_prompt) and not any(args.n_gen):
        raise OffloadConfigError("-p 0 and -n 0 leave nothing to measure: give one of them a length")


def add_output(to: argparse.ArgumentParser) -> None:
    """`-o md|json|jsonl|csv` and `--save FILE`."""
    to.add_argument("-o", "--output", choices=FORMATS, default="md", help="form of the table (default md)")
    to.add_argument("--save", metavar="FILE", type=Path, help="also write a result document (JSON) to FILE")


def positive(text: str) -> int:
    """A whole number of at least 1.

    Raises:
        ArgumentTypeError: it is none.
    """
    (value,) = parse_ints(text) if "," not in text else (0,)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value
