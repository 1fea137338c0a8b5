"""Pictures of results: throughput against offloaded GiB, one panel per test, the bound as a dashed line.

Drawn without a display. What a picture shows (model, device, simulated or not) is in its title and in its metadata, so
that it is not passed on without.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import GIB
from bench.rows import Row, short_config, tokens_per_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"none": "#444444", "uva": "#1f77b4", "prefetch": "#d95f02"}
MARKERS = ("o", "s", "^", "D", "v", "P")
PANEL_INCHES = (5.6, 4.0)


def throughput_figure(rows: Sequence[Row], title: str) -> Figure:
    """Draw the rows that have times; those that do not fit are crosses on the axis.

    Args:
        rows: any mix of backends, batches and tests.
        title: says the model and the device, and whether the times are simulated or a CPU's.
    """
    from matplotlib.figure import Figure

    tests = list(dict.fromkeys(row.test for row in rows)) or ["no rows"]
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(tests), height), layout="constrained")
    axes = figure.subplots(1, len(tests), squeeze=False)[0]
    for axis, test in zip(axes, tests, strict=True):
        _panel(axis, [row for row in rows if row.test == test], test)
    figure.suptitle(title, fontsize=11)
    return figure


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write the figure (the suffix says the form), its title also as metadata; makes the folder."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    title = figure.get_suptitle()
    metadata = {"Title": title} if target.suffix in (".png", ".svg", ".pdf") else None
    figure.savefig(target, dpi=120, metadata=metadata)
    return target


def _panel(axis: Axes, rows: Sequence[Row], test: str) -> None:
    batches = sorted({row.batch for row in rows})
    for batch, marker in zip(batches, MARKERS * len(batches), strict=False):
        alike = [row for row in rows if row.batch == batch]
        for backend in COLOURS:
            _series(axis, [row for row in alike if row.backend == backend], backend, batch, marker, len(batches) > 1)
    missing = [row.offloaded_bytes / GIB for row in rows if row.step_s is None and row.offloaded_bytes is not None]
    if missing:
        axis.plot(missing, [0.0] * len(missing), "x", color="#aa0000", label="does not fit", clip_on=False)
    axis.set(title=test, xlabel="offloaded weights (GiB)", ylabel="tokens/s")
    axis.set_ylim(bottom=0)
    axis.margins(x=0.06)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _series(axis: Axes, rows: Sequence[Row], backend: str, batch: int, marker: str, name_batch: bool) -> None:
    timed = sorted((row for row in rows if row.step_s is not None), key=lambda row: row.offloaded_bytes or 0)
    if not timed:
        return
    label = {"none": "no offload"}.get(backend, backend) + (f", batch {batch}" if name_batch else "")
    colour, where = COLOURS[backend], [(row.offloaded_bytes or 0) / GIB for row in timed]
    # A budget is one axis; prefetch configurations of equal bytes are different schedules, and no line joins them.
    line = "-" if backend == "uva" else ""
    axis.errorbar(
        where,
        [row.tokens_per_s for row in timed],
        yerr=_spread(timed),
        fmt=marker,
        linestyle=line,
        color=colour,
        capsize=2,
        label=label,
    )
    if backend == "prefetch":
        for x, row in zip(where, timed, strict=True):
            axis.annotate(
                short_config(row.config).removeprefix("prefetch "),
                (x, row.tokens_per_s),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=6,
                color=colour,
            )
    bounded = [(x, row) for x, row in zip(where, timed, strict=True) if row.bound_s]
    if bounded:
        axis.plot(
            [x for x, _ in bounded],
            [tokens_per_row(row.test, row.batch) / row.bound_s for _, row in bounded],
            linestyle="--" if backend == "uva" else "",
            marker="_",
            color=colour,
            alpha=0.6,
            label=f"bound, {label}",
        )


def _spread(rows: Sequence[Row]) -> list[list[float]]:
    """Distance from the median down to the slowest and up to the fastest repetition, in tokens/s."""
    fastest = [tokens_per_row(row.test, row.batch) / min(row.samples_s) - row.tokens_per_s for row in rows]
    slowest = [row.tokens_per_s - tokens_per_row(row.test, row.batch) / max(row.samples_s) for row in rows]
    return [[max(value, 0.0) for value in slowest], [max(value, 0.0) for value in fastest]]
