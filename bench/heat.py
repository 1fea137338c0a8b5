"""Heat maps over a prefetch sweep: throughput, stall and slot memory by group (rows) and prefetch step (columns)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bench.machine import GIB
from bench.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = Callable[[Row], float | None]
PANELS: tuple[tuple[str, Value, str], ...] = (
    ("tokens/s", lambda row: row.tokens_per_s, "viridis"),
    ("stall per step (ms)", lambda row: None if row.stall_s is None else row.stall_s * 1e3, "magma_r"),
    ("slots (GiB)", lambda row: None if row.slot_bytes is None else row.slot_bytes / GIB, "Blues"),
)
CELL_INCHES = (0.75, 0.42)
MARGIN_INCHES = (1.9, 1.5)
NO_STEP = 0
"""Column of nothing: steps begin at 1."""


def place(row: Row) -> tuple[str, int] | None:
    """(label of the group, step) of a prefetch row; None for any other."""
    fields = json.loads(row.config).get("prefetch", {}) if row.config and row.backend == "prefetch" else {}
    if not fields:
        return None
    label = f"{fields.get('offload_num_in_group', 1)} of {fields['offload_group_size']}"
    return label, fields.get("offload_prefetch_step", 1)


def heat_figure(rows: Sequence[Row], title: str) -> Figure:
    """Draw the prefetch rows; a configuration that was not timed stays empty.

    Args:
        rows: of one batch and one test.
        title: says the model and the device, and whether times are simulated.
    """
    from matplotlib.figure import Figure

    placed = {where: row for row in rows if (where := place(row)) is not None and row.step_s is not None}
    groups = list(dict.fromkeys(label for label, _ in placed))
    steps = sorted({step for _, step in placed}) or [NO_STEP]
    width = CELL_INCHES[0] * len(steps) + MARGIN_INCHES[0]
    height = CELL_INCHES[1] * max(len(groups), 1) + MARGIN_INCHES[1]
    figure = Figure(figsize=(width * len(PANELS), height), layout="constrained")
    axes = figure.subplots(1, len(PANELS), squeeze=False)[0]
    for axis, (name, value, colours) in zip(axes, PANELS, strict=True):
        cells = [[_cell(placed.get((group, step)), value) for step in steps] for group in groups]
        _panel(axis, cells, name, colours)
        axis.set(xlabel="prefetch step", title=name)
        axis.set_xticks(range(len(steps)), [str(step) for step in steps])
        axis.set_yticks(range(len(groups)), groups)
    axes[0].set_ylabel("layers offloaded")
    figure.suptitle(title, fontsize=11)
    return figure


def _cell(row: Row | None, value: Value) -> float:
    found = None if row is None else value(row)
    return math.nan if found is None else found


def _panel(axis: Axes, cells: Sequence[Sequence[float]], name: str, colours: str) -> None:
    if not cells:
        return
    image = axis.imshow(cells, cmap=colours, aspect="auto")
    for y, line in enumerate(cells):
        for x, value in enumerate(line):
            if not math.isnan(value):
                dark = image.norm(value) < 0.5 if colours == "viridis" else image.norm(value) > 0.5
                axis.text(x, y, _text(value), ha="center", va="center", fontsize=7, color="white" if dark else "black")


def _text(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
