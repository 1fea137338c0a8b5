"""A loaded model that generates: prompts in, tokens and text out, one forward at a time.

`generate` is a loop over `start` and `decode_step`, which are public so that a measurement times exactly what a user
runs. Data crosses to Python once per step, through the device object: the tokens that were chosen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offload.answers import Answers, Generation, OnToken
from offload.assemble import Parts, assemble
from offload.config import OffloadConfig
from offload.decoding import Decoding
from offload.device import Device, require_memory
from offload.kv_cache import KVCache, kv_bytes
from offload.loader import LoadFormat
from offload.report import MemoryReport
from offload.sampling import Sampler
from offload.text import shortened
from offload.tokenizer import Message

Prompt = str | Sequence[int]


class Engine:
    """A model with its weights in place; made by `load`, a context manager, closed once.

    Args:
        parts: what `assemble` put together.
        max_context: tokens per sequence that every cache is made for; None makes each as long as its call needs.
        graph: whether decode steps are captured and replayed.
    """

    def __init__(self, parts: Parts, max_context: int | None = None, graph: bool = False) -> None:
        self._parts = parts
        self._max_context = max_context
        self._graph = graph
        self._lock = threading.RLock()
        self._memory: Tensor | None = None
        self._decoding: Decoding | None = None
        self._closed = False

    @property
    def parts(self) -> Parts:
        """The model, its plan, backend, device and tokenizer."""
        return self._parts

    @property
    def context(self) -> int:
        """How many tokens a sequence may have, prompt and answer together."""
        return self._max_context or self._parts.model.context

    # -- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        stop_at_eos: bool = True,
        on_token: OnToken | None = None,
    ) -> list[Generation]:
        """Continue every prompt, each as if it were alone.

        Args:
            prompts: texts or token lists, of any lengths.
            max_new_tokens: how many tokens to add at most, at least 1.
            temperature: 0 takes the likeliest token.
            seed: makes a positive temperature repeatable.
            stop_at_eos: whether the end token ends a sequence; if not, it is a token like any other.
            on_token: called with (index of the prompt, token, text that the token completes) as tokens come.

        Returns:
            One generation per prompt, in order.

        Raises:
            ValueError: a prompt, a number of tokens or the temperature is not usable, or a text has no tokenizer.
            ModelLoadError: the key-value cache does not fit.
        """
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {shortened(max_new_tokens)}: give a positive integer")
        token_lists = self.encode(prompts)
        ends = self._parts.end_tokens if stop_at_eos else frozenset()
        with self._running():
            sampler = Sampler(self._parts.device, temperature, seed)
            answers = Answers(len(token_lists), max_new_tokens, ends, on_token, self._parts.tokenizer)
            if token_lists:
                decoding = self._start(token_lists, self._needed_context(token_lists, max_new_tokens), sampler)
                answers.add(decoding.last)
                while not answers.done:
                    self._require_current(decoding)
                    answers.add(decoding.step())
        return answers.generations()

    def chat_prompt(self, messages: str | Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation in the model's own form, for `generate`.

        Args:
            messages: one user's text, or messages with "role" and "content".

        Raises:
            ValueError: the model has no tokenizer or chat template, or the template refuses the messages.
        """
        return self._parts.require_tokenizer().chat(messages)

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the tokens of every prompt, checked.

        Raises:
            ValueError: a prompt is empty or has a token that the model does not know, or a text has no tokenizer.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise ValueError(f"prompts is {shortened(prompts)}: give a list of texts or of token lists")
        vocabulary = self._parts.vocabulary
        token_lists = []
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
                raise ValueError(f"prompt {index} is {shortened(prompt)}: give a text or a list of tokens")
            tokens = self._parts.require_tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)
            if not tokens:
                raise ValueError(f"prompt {index} is empty: give at least one token")
            for token in tokens:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                    raise ValueError(
                        f"prompt {index}: {shortened(token)} is no token of the model: give integers below {vocabulary}"
                    )
            token_lists.append(tokens)
        return token_lists

    # -- one step at a time -----------------------------------------------------------------------------------------

    def start(
        self, token_lists: Sequence[Sequence[int]], context: int, temperature: float = 0.0, seed: int | None = None
    ) -> Decoding:
        """Run the prompts of a new batch; `last` of what is returned are the first new tokens.

        There is one batch at a time: starting another ends it.

        Args:
            token_lists: the prompts.
            context: tokens per sequence that there must be room for, prompts included.
            temperature, seed: as for `generate`.

        Raises:
            ValueError: a prompt is not usable, or longer than the context.
            ModelLoadError: the key-value cache does not fit.
        """
        token_lists = self.encode(token_lists)
        if not token_lists:
            raise ValueError("there are no prompts: give at least one")
        with self._running():
            longest = max(map(len, token_lists))
            if context < longest:
                raise ValueError(f"the longest prompt has {longest} tokens, the context is {context}: make it longer")
            context = self._needed_context(token_lists, context - longest)
            return self._start(token_lists, context, Sampler(self._parts.device, temperature, seed))

    def decode_step(self, decoding: Decoding) -> list[int]:
        """Run one decode step of the batch that `start` returned; returns the next token of each sequence.

        Raises:
            ValueError: its context is used up, or another batch has been started since.
        """
        with self._running():
            self._require_current(decoding)
            return decoding.step()

    def _require_current(self, decoding: Decoding) -> None:
        """Refuse to go on with a batch whose memory is another's now, also where its own `on_token` started that."""
        if decoding is not self._decoding:
            raise ValueError("this batch has ended, because another was started or the engine closed: one at a time")

    def _needed_context(self, token_lists: Sequence[Sequence[int]], new_tokens: int) -> int:
        for index, tokens in enumerate(token_lists):
            if len(tokens) + new_tokens > self.context:
                raise ValueError(
                    f"prompt {index} has {len(tokens)} tokens and {new_tokens} more are asked for, but the context is "
                    f"{self.context}: shorten the prompt or ask for fewer"
                )
        return self._max_context or max(map(len, token_lists)) + new_tokens

    def _start(self, token_lists: Sequence[Sequence[int]], context: int, sampler: Sampler) -> Decoding:
        parts = self._parts
        cache = self._new_cache(len(token_lists), context)
        decoding = Decoding(parts.model, parts.device, parts.backend, cache, sampler, self._graph)
        decoding.prefill(token_lists)
        self._decoding = decoding
        return decoding

    def _new_cache(self, batch: int, context: int) -> KVCache:
        device, shape, dtype = self._parts.device, self._parts.model.cache_shape, self._parts.dtype
        nbytes = kv_bytes(shape, batch, context, dtype)
        self._decoding = None
        if self._memory is None or self._memory.numel() != nbytes:
            self._memory = None
            purpose = f"{device.name} for the key-value cache of {batch} x {context} tokens"
            require_memory(purpose, nbytes, device.device_memory(), "use fewer prompts or a shorter context")
            self._memory = device.allocate_device(nbytes)
        return KVCache(self._memory, shape, batch, context, dtype)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """One thread at a time, with the device watching, and without autograd."""
        with self._lock:
            if self._closed:
                raise ValueError("the engine is closed: load the model again")
            with self._parts.device.active(), torch.inference_mode():
                yield

    # -- memory -----------------------------------------------------------------------------------------------------

    def report(self) -> MemoryReport:
        """Count the memory of weights, slots and cache, as it is allocated now."""
        kv = self._memory.numel() if self._memory is not None else 0
        return replace(self._parts.backend.report(), kv_bytes=kv)

    def close(self) -> None:
        """Give everything back; waits for a running generation. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._decoding = self._memory = None
                self._parts.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(
    path: str,
    offload_config: OffloadConfig | Mapping[str, Any] | str | None = None,
    device: Device | torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    load_format: LoadFormat = "safetensors",
    max_context: int | None = None,
    *,
    graph: bool = False,
    needs_text: bool = False,
) -> Engine:
    """Load a model, part of its weights on the host as the configuration says.

    Args:
        path: folder of the model; with load_format "dummy" or "meta" also a `config.json` alone.
        offload_config: vLLM's OffloadConfig as JSON text, dict or object; None offloads nothing.
        device: a name for `open_device`, or an open device, which stays the caller's; None takes a GPU if there is one.
        dtype: of the weights; None takes the one in `config.json`.
        load_format: "safetensors", "dummy" (random weights, no files needed) or "meta" (none at all, on a virtual GPU).
        max_context: tokens per sequence that caches are made for; None makes each as long as a call needs.
        graph: capture the decode step once per batch and replay it.
        needs_text: refuse a model without a tokenizer before its weights are read.

    Returns:
        The engine; close it, or use it as a context manager.

    Raises:
        OffloadConfigError: the configuration is wrong, or would offload nothing on this model.
        ModelLoadError: the model cannot be loaded with it on this device.
        ValueError: max_context or load_format is not usable.
    """
    parts = assemble(path, offload_config, device, dtype, load_format, max_context, needs_text)
    return Engine(parts, max_context, graph)
