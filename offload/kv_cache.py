"""The static key-value cache, and the attention over it: three kinds of step, one memory.

One allocation, (keys and values, layers, batch, kv heads, context, head_dim), is written in place and never copied.
Sequences of unlike lengths are padded on the right, so position p of a sequence is always row p of its cache. What
differs between steps is which rows are written and read:

- `Prefill` writes rows 0..T-1 of every sequence and attends causally within the new keys. Rows past the end of a
  short sequence are written too; nothing before them can see them, and decoding overwrites them one by one.
- `DecodeTogether` has every sequence at the same position, known to Python: the cache is sliced, and no mask is needed.
- `DecodeRagged` has a position per sequence, known only to the device: a mask hides later rows. It is also the step
  that can be captured and replayed, over the whole cache.

In a decode step the query heads of one group are the rows of one attention with their key-value head: the same
arithmetic as repeating keys, without the repetition, and the result comes out in the order that the next linear reads.
What all layers need alike (slices, masks) is made once per step, because a decode step on a small model costs what its
operators cost to issue.
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
    """How one forward writes and reads the cache."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """Write `key` and `value` of a layer, each (B, T, kv heads, D), and attend.

        Args:
            layer: its index.
            query, key, value: (B, T, heads or kv heads, D), rotated.
            window: how many positions a query sees, itself included; None for all up to its own.

        Returns:
            (B, T, heads * D).
        """


class KVCache:
    """Keys and values of every layer for `batch` sequences of at most `context` tokens.

    Args:
        memory: `kv_bytes` of device memory, uint8; it is zeroed, since a masked row still enters as 0 times its value.
        shape: of the model.
        batch, context: of this cache.
        dtype: of keys and values.

    Attributes:
        rows: (2, layers, batch, kv heads, context, head_dim), keys and then values.
        context: how many tokens there is room for.
        step: what the forward that comes next does; set before each.
    """

    step: Step

    def __init__(self, memory: Tensor, shape: CacheShape, batch: int, context: int, dtype: torch.dtype) -> None:
        self.context = context
        memory.zero_()
        self.rows = memory.view(dtype).view(2, shape.layers, batch, shape.heads, context, shape.head_dim)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """Do what the present step does; see `Step.attend`."""
        return self.step.attend(layer, query, key, value, window)


class Prefill:
    """The first forward of new sequences: `length` tokens each, from position 0."""

    def __init__(self, cache: KVCache, length: int) -> None:
        self._keys, self._values = _by_layer(cache.rows.narrow(4, 0, length).transpose(3, 4))
        self._length = length
        self._masks: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        self._keys[layer].copy_(key)
        self._values[layer].copy_(value)
        grouped = query.shape[2] != key.shape[2]
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if window is None or self._length <= window:
            attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        else:
            mask = self._mask(window, query)
            attended = scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped)
        return attended.transpose(1, 2).flatten(2)

    def _mask(self, window: int, like: Tensor) -> Tensor:
        """(T, T): 0 where a key is one of the last `window` up to the query, else minus infinity; once per forward."""
        if window not in self._masks:
            positions = torch.arange(self._length, device=like.device)
            behind = positions[:, None] - positions
            self._masks[window] = _additive((behind >= 0) & (behind < window), like.dtype)
        return self._masks[window]


class DecodeTogether:
    """One token per sequence, all at the same position."""

    def __init__(self, cache: KVCache, position: int) -> None:
        self._rows = cache.rows
        self._position = position
        self._new_keys, self._new_values = _by_layer(cache.rows.select(4, position).unsqueeze(3))
        self._seen: dict[int | None, tuple[Layers, Layers]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        self._new_keys[layer].copy_(key)
        self._new_values[layer].copy_(value)
        if window not in self._seen:
            first = 0 if window is None else max(0, self._position + 1 - window)
            self._seen[window] = _grouped(self._rows.narrow(4, first, self._position + 1 - first))
        keys, values = self._seen[window]
        return _attend_grouped(query, keys[layer], values[layer], None)


class DecodeRagged:
    """One token per sequence, each at its own position.

    Args:
        cache: where it is written and read.
        positions: (B, 1) int64 on the device.
        length: how many rows of the cache are read: more than every position.
    """

    def __init__(self, cache: KVCache, positions: Tensor, length: int) -> None:
        batch, self._kv_heads, context, head_dim = cache.rows.shape[2:]
        firsts = torch.arange(0, batch * self._kv_heads * context, context, device=positions.device)
        self._places = (firsts.view(batch, self._kv_heads) + positions).view(-1)
        self._all_keys, self._all_values = _by_layer(cache.rows.flatten(2, 4))
        self._keys, self._values = _grouped(cache.rows.narrow(4, 0, length))
        self._positions, self._length = positions, length
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        self._all_keys[layer].index_copy_(0, self._places, key.flatten(0, 2))
        self._all_values[layer].index_copy_(0, self._places, value.flatten(0, 2))
        return _attend_grouped(query, self._keys[layer], self._values[layer], self._mask(window, query.dtype))

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(B * kv heads, 1, 1, rows): 0 for rows that a sequence may see, else minus infinity; once per forward."""
        if window not in self._masks:
            rows = torch.arange(self._length, device=self._positions.device)
            seen = rows <= self._positions
            if window is not None:
                seen &= rows > self._positions - window
            by_head = _additive(seen, dtype)[:, None, None].expand(-1, self._kv_heads, -1, -1)
            self._masks[window] = by_head.flatten(0, 1).unsqueeze(1)
        return self._masks[window]


Layers = tuple[Tensor, ...]


def _by_layer(rows: Tensor) -> tuple[Layers, Layers]:
    """(2, layers, ...) -> keys and values of each layer."""
    keys, values = rows.unbind(0)
    return keys.unbind(0), values.unbind(0)


def _grouped(rows: Tensor) -> tuple[Layers, Layers]:
    """(2, layers, B, kv heads, rows, D) -> keys and values of each layer, (B * kv heads, 1, rows, D)."""
    return _by_layer(rows.flatten(2, 3).unsqueeze(3))


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _attend_grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """query (B, 1, heads, D), keys and values (B * kv heads, 1, rows, D) -> (B, 1, heads * D)."""
    batch, _, _, head_dim = query.shape
    # Sequence and key-value head are one batch axis: then the result comes out in the order that o_proj reads.
    grouped = query.reshape(keys.shape[0], 1, -1, head_dim)
    return scaled_dot_product_attention(grouped, keys, values, mask).view(batch, 1, -1)
