"""What several subcommands take: the configuration, the model's folder, and numbers with their limits."""

import argparse
from collections.abc import Callable
from typing import Any

from offload.text import shortened


def add_offload_config(parser: argparse.ArgumentParser, **keywords: Any) -> None:
    """Add `--offload-config`; `OffloadConfig.from_argument` reads it."""
    parser.add_argument(
        "--offload-config",
        metavar="JSON|@FILE",
        help="vLLM's OffloadConfig as JSON text, or a file with it",
        **keywords,
    )


def add_model(parser: argparse.ArgumentParser, **keywords: Any) -> None:
    """Add `--model`, a folder."""
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face model folder", **keywords)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add `--dtype`."""
    parser.add_argument("--dtype", metavar="T", help="float32, bfloat16 or float16 (default: the model's own)")


def number(convert: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    """A type for argparse: a finite number that is not below `least`, refused in words otherwise."""

    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shortened(text)} is not {_KINDS[convert]}") from None
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{shortened(text)} is not {_KINDS[convert]} of at least {least:g}")
        return value

    return parse


_KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}
