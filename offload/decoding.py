"""One batch of sequences on its way through a model: a prefill, then decode steps, eager or replayed from a graph.

All that a step needs stays on the device: the tokens that were chosen, the positions, the cache. Python knows the
lengths, so it can slice the cache without asking. What crosses to Python is one small tensor per step, the tokens.

A captured step reads the whole cache through a mask and writes its logits into a static buffer. It may be issued
several times without harm (it writes the same values to the same places); what must happen once per step, moving on to
the next position, is outside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.backend import Backend
from offload.device import Device, Graph
from offload.kv_cache import DecodeRagged, DecodeTogether, KVCache, Prefill
from offload.models.base import Architecture
from offload.sampling import Sampler

PADDING_TOKEN = 0  # any token will do: nothing looks at what stands behind the end of a sequence


class Decoding:
    """The state of one batch.

    Args:
        model: attached to its weights.
        device: where it runs.
        backend: told about captures.
        cache: empty, for as many sequences.
        sampler: chooses the tokens.
        graph: whether decode steps are captured once and replayed.

    Attributes:
        lengths: tokens of each sequence that are in the cache.
        last: the tokens chosen by the latest step, one per sequence.
    """

    def __init__(
        self,
        model: Architecture,
        device: Device,
        backend: Backend,
        cache: KVCache,
        sampler: Sampler,
        graph: bool = False,
    ) -> None:
        self._model, self._device, self._backend = model, device, backend
        self._cache = cache
        self._sampler = sampler
        self._wants_graph = graph
        self._graph: Graph | None = None
        self._tokens: Tensor | None = None
        self._positions: Tensor | None = None
        self._logits: Tensor | None = None
        self.lengths: list[int] = []
        self.last: list[int] = []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Run the prompts and choose the first new token of each.

        Args:
            prompts: tokens, of unlike lengths if need be; shorter ones are padded on the right.
        """
        self.lengths = [len(prompt) for prompt in prompts]
        longest = max(self.lengths)
        padded = [[*prompt, *[PADDING_TOKEN] * (longest - len(prompt))] for prompt in prompts]
        tokens = self._device.from_host(padded)
        positions = torch.arange(longest, device=tokens.device).expand(len(prompts), -1)
        self._cache.step = Prefill(self._cache, longest)
        hidden = self._model(tokens, positions, self._cache)
        ends = [index * longest + length - 1 for index, length in enumerate(self.lengths)]
        last = hidden.flatten(0, 1).index_select(0, self._device.from_host(ends))
        self._positions = self._device.from_host([[length] for length in self.lengths])
        return self._choose(self._model.logits(last), "pp")

    def step(self) -> list[int]:
        """Feed the tokens chosen last, choose the next of each sequence, and return them."""
        longest = max(self.lengths)
        if longest >= self._cache.context:
            raise ValueError(f"the cache holds {self._cache.context} tokens per sequence, and all are used")
        logits = self._captured() if self._wants_graph else self._eager(longest)
        self._positions.add_(1)
        self.lengths = [length + 1 for length in self.lengths]
        return self._choose(logits, "tg")

    def _choose(self, logits: Tensor, step: str) -> list[int]:
        chosen = self._sampler(logits)
        if self._tokens is None:
            self._tokens = chosen
        else:
            self._tokens.copy_(chosen)
        self.last = [row[0] for row in self._device.to_host(chosen)]
        self._device.mark_step(step)
        return self.last

    def _eager(self, longest: int) -> Tensor:
        if min(self.lengths) == longest:
            self._cache.step = DecodeTogether(self._cache, longest)
        else:
            self._cache.step = DecodeRagged(self._cache, self._positions, longest + 1)
        return self._forward()

    def _forward(self) -> Tensor:
        return self._model.logits(self._model(self._tokens, self._positions, self._cache)[:, 0])

    def _captured(self) -> Tensor:
        if self._graph is not None:
            self._graph.replay()
            return self._logits
        if self._logits is None:
            # The first step runs eagerly: libraries set themselves up at first use, which a capture does not allow.
            self._logits = self._static_forward().clone()
            return self._logits
        self._capture()
        self._backend.before_capture()
        self._graph.replay()
        return self._logits

    def _capture(self) -> None:
        self._backend.before_capture()
        try:
            self._graph = self._device.capture(self._captured_body)
        finally:
            self._backend.after_capture()

    def _captured_body(self) -> None:
        self._logits.copy_(self._static_forward())
        self._backend.before_capture_ends()

    def _static_forward(self) -> Tensor:
        self._cache.step = DecodeRagged(self._cache, self._positions, self._cache.context)
        return self._forward()
