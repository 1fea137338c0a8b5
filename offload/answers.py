"""The answers of one batch while they grow: which sequences go on, and what their callers hear of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.tokenizer import Tokenizer

OnToken = Callable[[int, int, str], None]
"""Called with the index of the prompt, a new token, and the text that the token completes."""


@dataclass(frozen=True)
class Generation:
    """What a model wrote after one prompt.

    Attributes:
        text: the text of the new tokens, without special ones; None if the model has no tokenizer.
        token_ids: the new tokens, the end token among them if it came.
    """

    text: str | None
    token_ids: list[int]


class Answers:
    """The new tokens of each sequence, and which sequences are done.

    Args:
        count: sequences in the batch.
        limit: tokens that an answer has at most.
        ends: tokens that end an answer.
        on_token: hears of every token; None if nobody does.
        tokenizer: makes text of tokens; None if the model has none.
    """

    def __init__(
        self, count: int, limit: int, ends: frozenset[int], on_token: OnToken | None, tokenizer: Tokenizer | None
    ) -> None:
        self._token_ids: list[list[int]] = [[] for _ in range(count)]
        self._open = list(range(count))
        self._limit, self._ends = limit, ends
        self._on_token, self._tokenizer = on_token, tokenizer
        self._streams = [tokenizer.stream() for _ in range(count)] if tokenizer and on_token else None

    @property
    def done(self) -> bool:
        """Whether every answer has ended."""
        return not self._open

    def add(self, tokens: Sequence[int]) -> None:
        """Take one step's tokens, one per sequence; those of answers that have ended are nobody's."""
        for index in self._open:
            self._token_ids[index].append(tokens[index])
            if self._on_token is not None:
                text = self._streams[index].put(tokens[index]) if self._streams else ""
                self._on_token(index, tokens[index], text)
        self._open = [index for index in self._open if not self._has_ended(self._token_ids[index])]

    def _has_ended(self, token_ids: Sequence[int]) -> bool:
        return token_ids[-1] in self._ends or len(token_ids) == self._limit

    def generations(self) -> list[Generation]:
        """Return the answers, in order."""
        decode = self._tokenizer.decode if self._tokenizer else lambda token_ids: None
        return [Generation(decode(token_ids), token_ids) for token_ids in self._token_ids]
