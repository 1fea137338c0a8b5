"""Pictures of results: throughput against offloaded GiB, one panel per test, the bound as a dashed line.

Drawn without a display. What a picture shows (model, device, simulated or not) is in its title and in its metadata, so
that it is not passed on without.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import GIB
from bench.rows import NOT_LOADED, Row, short_config, tokens_per_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"none": "#444444", "uva": "#1f77b4", "prefetch": "#d95f02"}
MARKERS = ("o", "s", "^", "D", "v", "P")
LOG_ABOVE = 8
"""Ratio of the highest to the lowest throughput above which the axis is logarithmic."""
PANEL_INCHES = (5.6, 4.0)


def throughput_figure(rows: Sequence[Row], title: str) -> Figure:
    """Draw the rows that have times; those that do not fit are crosses on the axis.

    Args:
        rows: any mix of backends, batches and tests.
        title: says the model and the device, and whether the times are simulated or a CPU's.
    """
    from matplotlib.figure import Figure

    tests = list(dict.fromkeys(row.test for row in rows if row.test != NOT_LOADED)) or ["nothing fits"]
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(tests), height), layout="constrained")
    axes = figure.subplots(1, len(tests), squeeze=False)[0]
    for axis, test in zip(axes, tests, strict=True):
        _panel(axis, [row for row in rows if row.test in (test, NOT_LOADED)], test)
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
    missing = sorted({row.offloaded_bytes / GIB for row in rows if row.step_s is None})
    if missing:
        bottom = axis.get_xaxis_transform()
        axis.plot(
            missing, [0.0] * len(missing), "x", color="#aa0000", label="does not fit", clip_on=False, transform=bottom
        )
    axis.set(title=test, xlabel="offloaded weights (GiB)", ylabel="tokens/s")
    axis.margins(x=0.06, y=0.1)
    _scale(axis, rows)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _scale(axis: Axes, rows: Sequence[Row]) -> None:
    """From zero up; over a wide range logarithmic, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    speeds = [row.tokens_per_s for row in rows if row.tokens_per_s is not None]
    if speeds and max(speeds) > LOG_ABOVE * min(speeds):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(0, axis.get_ylim()[1])


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
