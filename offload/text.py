"""How values are written in messages and tables: one line, cut, with their unit."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

GIB = 1024**3


def shortened(value: Any) -> str:
    """A value as JSON text for a one-line message, cut at 80 characters."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def quoted(names: Iterable[str], limit: int = 5) -> str:
    """Names in quotes, separated by commas; beyond `limit` only how many more there are."""
    names = list(names)
    text = ", ".join(shortened(name) for name in names[:limit])
    return f"{text} and {len(names) - limit} more" if len(names) > limit else text


def ranges(indices: Sequence[int]) -> str:
    """Ascending indices with runs joined: [0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def gib(nbytes: float) -> str:
    """Bytes as GiB (2^30), with enough digits for a small weight to show."""
    return f"{nbytes / GIB:.3f} GiB" if abs(nbytes) >= GIB / 100 or not nbytes else f"{nbytes / GIB:.3g} GiB"
