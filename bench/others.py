"""Other libraries that generate from the same folder, slowed by nothing: greedy, with their own cache and attention.

Their `generate` drives the comparison: after each token it asks its stopping criteria, and there our arms take their
turn, outside the time that is charged to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bench.subject import Subject
from offload import offload_
from offload.config import OffloadConfig
from offload.device import Device
from offload.report import MemoryReport


class Watch(Protocol):
    """What `generate` reports to."""

    def round(self) -> None:
        """Let every other arm take one step."""

    def note(self, name: str, seconds: float) -> None:
        """Keep the time of one token."""


class Transformers:
    """A model as `transformers` loads it, wholly on the device.

    Args:
        subject: a folder with safetensors.
        device: open; the model is put where its tensors are.
    """

    name = "transformers"

    def __init__(self, subject: Subject, device: Device) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        dtype = subject.dtype or "auto"
        self._synchronise = device.synchronise
        self._device = device.torch_device
        self._model = self._placed(AutoModelForCausalLM.from_pretrained(subject.path, dtype=dtype).eval())
        # An end token is a token like any other here: both sides make the same number of tokens.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def _placed(self, model: Any) -> Any:
        return model.to(self._device)

    def generate(self, text: Sequence[int], tokens: int, watch: Watch) -> list[int]:
        """Generate, the other arms taking a step after each token but the first; returns the new tokens.

        The first token is the prompt's and is timed for nobody; `watch` gets `tokens` times and rounds.
        """
        turns = _Turns(self.name, watch, self._synchronise)
        given = torch.tensor([list(text)], device=self._device)
        with torch.inference_mode():
            answer = self._model.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=False,
                max_new_tokens=tokens + 1,
                stopping_criteria=[turns],
            )
        return answer[0, len(text) :].tolist()


class InPlace:
    """A model of transformers that makes one token a call; with a configuration, offloaded in place by `offload_`.

    Args:
        subject: a folder with safetensors.
        device: open.
        config: what is offloaded; None leaves the model as it is.
    """

    def __init__(self, subject: Subject, device: Device, config: OffloadConfig | None) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(subject.path, dtype=subject.dtype or "auto").eval()
        self._model = model.to(device.torch_device)
        self._handle = offload_(model, config, device=device) if config else None
        self._device = device.torch_device
        self._cache: Any = None
        self._last: torch.Tensor | None = None

    def start(self, text: Sequence[int]) -> None:
        """Run a prompt with a fresh cache."""
        self._cache, self._last = None, torch.tensor([list(text)], device=self._device)
        self()

    def __call__(self) -> None:
        with torch.inference_mode():
            out = self._model(self._last, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache, self._last = out.past_key_values, out.logits[:, -1:].argmax(-1)

    def report(self) -> MemoryReport | None:
        """Memory of the offloaded model."""
        return self._handle.report() if self._handle else None

    def close(self) -> None:
        """Give the host memory back."""
        if self._handle:
            self._handle.close()


class Accelerate(Transformers):
    """The same model with every weight on the host, brought in by `accelerate`'s hooks module by module."""

    name = "accelerate"

    def _placed(self, model: Any) -> Any:
        from accelerate import cpu_offload

        return cpu_offload(model, execution_device=self._device)


class _Turns:
    """A stopping criterion that never stops: it takes the time of a token, and gives the others their turn."""

    def __init__(self, name: str, watch: Watch, synchronise: Callable[[], None]) -> None:
        self._name, self._watch, self._synchronise = name, watch, synchronise
        self._begin: float | None = None

    def __call__(self, tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._synchronise()
        if self._begin is not None:
            self._watch.note(self._name, time.perf_counter() - self._begin)
            self._watch.round()
        self._begin = time.perf_counter()
        return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)


LIBRARIES: dict[str, type[Transformers]] = {cls.name: cls for cls in (Transformers, Accelerate)}
