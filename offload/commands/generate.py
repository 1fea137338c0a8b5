"""Generate text from one prompt; the text goes to stdout as it comes, and one line of numbers to stderr.

The numbers are the new tokens, the rate of the decode steps, the weights on the host, the device memory of weights,
slots and key-value cache together, and the time to load.
"""

import argparse
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload.commands._options import add_dtype, add_model, add_offload_config, number
from offload.config import OffloadConfig
from offload.text import gib

if TYPE_CHECKING:
    from offload.engine import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`."""
    add_model(parser, required=True)
    parser.add_argument("--prompt", metavar="TEXT|-", required=True, help="what to continue; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--max-new-tokens", metavar="N", type=number(int, 1), default=128, help="(default: 128)")
    parser.add_argument("--temperature", metavar="T", type=number(float, 0), default=0.0, help="0 takes the likeliest")
    parser.add_argument("--seed", metavar="N", type=number(int, 0), help="makes a temperature above 0 repeatable")
    add_offload_config(parser)
    parser.add_argument("--device", metavar="D", help="cpu, cuda:0 or virtual:NAME (default: a GPU if there is one)")
    add_dtype(parser)
    parser.add_argument("--load-format", choices=("safetensors", "dummy", "meta"), default="safetensors")


def run(arguments: argparse.Namespace) -> int:
    """Load the model, stream one completion, print the numbers.

    Raises:
        OffloadConfigError: the configuration is wrong, or offloads nothing on this model.
        ModelLoadError: the model cannot be loaded.
        ValueError: the prompt cannot be used.
    """
    config = OffloadConfig.from_argument(arguments.offload_config)
    prompt = _prompt(arguments.prompt)
    from offload.engine import load  # imports torch: after what needs none

    started_s = time.perf_counter()
    with load(
        arguments.model,
        config,
        arguments.device,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        needs_text=True,
    ) as engine:
        load_s = time.perf_counter() - started_s
        stream = _Stream()
        engine.generate(
            [engine.chat_prompt(prompt) if arguments.chat else prompt],
            arguments.max_new_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
            on_token=stream.put,
        )
        print(flush=True)
        whose = " of the simulation itself" if engine.parts.device.simulated else ""
        numbers = f"{stream.rate()}{whose}, {_memory(engine)}, loaded in {load_s:.2f} s"
        print(f"[offload] {numbers}", file=sys.stderr)
    return 0


def _prompt(argument: str) -> str:
    """Return the text to continue; bytes that are none arrive as lone surrogates, or do not decode at all."""
    try:
        text = sys.stdin.read() if argument == "-" else argument
        text.encode()
    except UnicodeError as error:
        raise ValueError("the prompt has bytes that are not UTF-8 text: convert it to UTF-8") from error
    return text


@dataclass
class _Stream:
    """Prints tokens as they come, and remembers when."""

    times_s: list[float] = field(default_factory=list)

    def put(self, index: int, token: int, text: str) -> None:
        self.times_s.append(time.perf_counter())
        print(text, end="", flush=True)

    def rate(self) -> str:
        """The tokens and the rate from the first to the last: without the prompt, as a decode step is measured."""
        steps = len(self.times_s) - 1
        if steps < 1:
            return f"{len(self.times_s)} tokens, no decode step"
        return f"{steps + 1} tokens, {steps / (self.times_s[-1] - self.times_s[0]):.2f} tok/s"


def _memory(engine: "Engine") -> str:
    report = engine.report()
    return f"{gib(report.offloaded_bytes)} offloaded, {gib(report.device_bytes)} on the device"
