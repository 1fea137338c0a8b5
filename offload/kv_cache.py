"""The static key-value cache, and the attention over it: three kinds of step, one memory.

One allocation, (2, layers, batch, kv heads, context, head_dim), is written in place and never copied. Sequences of
unlike lengths are padded on the right, so position p of a sequence is always row p of its cache. What differs between
steps is which rows are written and read:

- `Prefill` writes rows 0..T-1 of every sequence and attends causally within the new keys. Rows past the end of a
  short sequence are written too; nothing before them can see them, and decoding overwrites them one by one.
- `DecodeTogether` has every sequence at the same position, known to Python: the cache is sliced, and no mask is needed.
- `DecodeRagged` has a position per sequence, known only to the device: a mask hides later rows. It is also the step
  that can be captured and replayed, over the whole cache.

In a decode step the query heads of one group are the rows of one attention with their key-value head: the same
arithmetic as repeating keys, without the repetition, and the result comes out in the order that the next linear reads.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from offload.models.base import CacheShape


def kv_bytes(shape: CacheShape, batch: int, context: int, dtype: torch.dtype) -> int:
    """Bytes of a cache for `batch` sequences of at most `context` tokens each."""
    return 2 * shape.layers * batch * shape.heads * context * shape.head_dim * dtype.itemsize


class Step(Protocol):
    """How one forward uses the cache of one layer."""

    def attend(self, keys: Tensor, values: Tensor, new: Projected, window: int | None) -> Tensor:
        """keys, values (B, kv heads, context, head_dim) -> (B, T, heads * head_dim); writes the new ones."""


class Projected:
    """Query, key and value of one layer and forward: (B, T, heads or kv heads, head_dim)."""

    __slots__ = ("key", "query", "value")

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.query, self.key, self.value = query, key, value


class Prefill:
    """The first forward of new sequences: T tokens each, from position 0."""

    def __init__(self) -> None:
        self._masks: dict[int, Tensor] = {}

    def attend(self, keys: Tensor, values: Tensor, new: Projected, window: int | None) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (new.query, new.key, new.value))
        batch, heads, length, head_dim = query.shape
        keys[:, :, :length].copy_(key)
        values[:, :, :length].copy_(value)
        grouped = heads != key.shape[1]
        if window is None or length <= window:
            attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        else:
            mask = self._mask(window, query)
            attended = scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped)
        return attended.transpose(1, 2).reshape(batch, length, heads * head_dim)

    def _mask(self, window: int, query: Tensor) -> Tensor:
        """(T, T): 0 where a key is one of the last `window` up to the query, else minus infinity; once per forward."""
        if window not in self._masks:
            positions = torch.arange(query.shape[2], device=query.device)
            behind = positions[:, None] - positions
            self._masks[window] = _additive((behind >= 0) & (behind < window), query.dtype)
        return self._masks[window]


class DecodeTogether:
    """One token per sequence, all at the same position."""

    def __init__(self, position: int) -> None:
        self._position = position

    def attend(self, keys: Tensor, values: Tensor, new: Projected, window: int | None) -> Tensor:
        position = self._position
        keys.select(2, position).copy_(new.key.squeeze(1))
        values.select(2, position).copy_(new.value.squeeze(1))
        first = 0 if window is None else max(0, position + 1 - window)
        rows = position + 1 - first
        return _attend_grouped(new.query, keys.narrow(2, first, rows), values.narrow(2, first, rows), None)


class DecodeRagged:
    """One token per sequence, each at its own position.

    Args:
        positions: (B, 1) int64 on the device.
        rows: how many rows of the cache are read: more than every position.
    """

    def __init__(self, positions: Tensor, rows: int) -> None:
        self._positions = positions
        self._rows = rows
        self._places: Tensor | None = None
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, keys: Tensor, values: Tensor, new: Projected, window: int | None) -> Tensor:
        batch, kv_heads, context, head_dim = keys.shape
        if self._places is None:
            firsts = torch.arange(0, batch * kv_heads * context, context, device=keys.device).view(batch, kv_heads)
            self._places = (firsts + self._positions).view(-1)
        for cache, fresh in ((keys, new.key), (values, new.value)):
            cache.view(-1, head_dim).index_copy_(0, self._places, fresh.reshape(-1, head_dim))
        mask = self._mask(window, keys)
        return _attend_grouped(new.query, keys.narrow(2, 0, self._rows), values.narrow(2, 0, self._rows), mask)

    def _mask(self, window: int | None, keys: Tensor) -> Tensor:
        """(B * kv heads, 1, 1, rows): 0 for rows that a sequence may see, else minus infinity; once per forward."""
        if window not in self._masks:
            rows = torch.arange(self._rows, device=keys.device)
            seen = rows <= self._positions
            if window is not None:
                seen &= rows > self._positions - window
            mask = _additive(seen, keys.dtype)
            self._masks[window] = mask.repeat_interleave(keys.shape[1], 0)[:, None, None]
        return self._masks[window]


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _attend_grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """query (B, 1, heads, D), keys and values (B, kv heads, rows, D) -> (B, 1, heads * D)."""
    batch, kv_heads, rows, head_dim = keys.shape
    # Sequence and key-value head are one batch axis: then the result comes out in the order that o_proj reads.
    grouped = query.reshape(batch * kv_heads, 1, -1, head_dim)
    keys, values = keys.flatten(0, 1).unsqueeze(1), values.flatten(0, 1).unsqueeze(1)
    return scaled_dot_product_attention(grouped, keys, values, mask).view(batch, 1, -1)


class KVCache:
    """Keys and values of every layer for `batch` sequences of at most `context` tokens.

    Args:
        memory: `kv_bytes` of device memory, uint8; it is zeroed, since a masked row still enters as 0 times its value.
        shape: of the model.
        batch, context: of this cache.
        dtype: of keys and values.

    Attributes:
        step: what the forward that comes next does; the engine sets it before each.
    """

    step: Step

    def __init__(self, memory: Tensor, shape: CacheShape, batch: int, context: int, dtype: torch.dtype) -> None:
        self.nbytes = memory.numel()
        self.batch, self.context = batch, context
        memory.zero_()
        whole = memory.view(dtype).view(2, shape.layers, batch, shape.heads, context, shape.head_dim)
        self._keys, self._values = whole[0].unbind(0), whole[1].unbind(0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """Write `key` and `value` (B, T, kv heads, D) of a layer; return attention of `query` (B, T, heads * D)."""
        return self.step.attend(self._keys[layer], self._values[layer], Projected(query, key, value), window)
