"""One row schema for every bench that runs a model, and the four forms in which rows are printed.

`json` is for programs: `{"machine": ..., "rows": [...]}` and nothing else on stdout. `md` is for people: what is the
same in every row is said once above the table, and only columns that vary (or are results) stay in it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from bench.machine import GIB, describe

NOT_LOADED = "load"
"""Test of a row whose model could not be loaded, so that nothing was timed."""
FORMATS = ("md", "json", "jsonl", "csv")


@dataclass(frozen=True)
class Row:
    """One configuration under one test.

    Attributes:
        backend: "none", "uva" or "prefetch".
        config: the offload configuration, one line of JSON; None for the run without offload.
        model: name of the model's folder or configuration.
        device: as the user names it: "cpu", "cuda:0", "virtual:h200-pcie5".
        simulated: True if the times come from a model of the hardware and not from a clock.
        load_format: where weights came from: "safetensors", "dummy" or "meta".
        batch: sequences at a time.
        test: "pp512" (a prompt of 512 tokens) or "tg32" (32 decode steps); "load" if it did not come to that.
        tokens_per_s: tokens of the whole batch over the median time.
        step_s: median time of one decode step (tg) or of the whole prompt (pp).
        bound_s: what the hardware allows at best; None where its rates are not known.
        share_of_bound: bound_s / step_s.
        bound_fastest_link_s: the bound if every byte used the faster of both links, to compare backends.
        offloaded_bytes, slot_bytes: weights on the host; device buffers they are copied into.
        device_bytes: resident weights + slots + staging + key-value cache.
        bus_bytes_per_step, bus_bytes_per_s: what crosses the bus, and how fast that is.
        stall_s, idle_s: compute waited for copies; the binding resource did nothing (simulated runs only).
        samples_s: every repetition's step_s.
        tokens: how the answer compares with the reference: "reference", "99 equal", "98 equal, 1 ties", "WRONG: ...".
        note: why there are no times ("does not fit: ..."), or what to know about them.
    """

    backend: str
    config: str | None
    model: str
    device: str
    simulated: bool
    load_format: str
    batch: int
    test: str
    tokens_per_s: float | None = None
    step_s: float | None = None
    bound_s: float | None = None
    share_of_bound: float | None = None
    bound_fastest_link_s: float | None = None
    offloaded_bytes: int | None = None
    device_bytes: int | None = None
    slot_bytes: int | None = None
    bus_bytes_per_step: int | None = None
    bus_bytes_per_s: float | None = None
    stall_s: float | None = None
    idle_s: float | None = None
    samples_s: tuple[float, ...] = ()
    tokens: str = ""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON values, in the order of the schema."""
        return {**asdict(self), "samples_s": list(self.samples_s)}


SCHEMA = tuple(field.name for field in fields(Row))


@dataclass(frozen=True)
class Column:
    """How one field is shown to people: its heading, its text, and whether it stays although it never varies."""

    field: str
    heading: str
    text: Callable[[Any], str]
    is_result: bool = False


def tokens_per_row(test: str, batch: int) -> int:
    """Tokens that one `step_s` handles: the prompts' for "pp512", one for each sequence for "tg32"."""
    return batch * int(test[2:]) if test.startswith("pp") else batch


def speed(row: dict[str, Any]) -> str:
    """`mean ± sd` of the tokens per second over the repetitions, as llama-bench prints it."""
    if not row["samples_s"]:
        return "-"
    speeds = [tokens_per_row(row["test"], row["batch"]) / sample for sample in row["samples_s"]]
    mean = statistics.fmean(speeds)
    if len(speeds) == 1:
        return digits(mean)
    return f"{digits(mean)} ± {statistics.stdev(speeds):.{_decimals(mean)}f}"


def step_ms(row: dict[str, Any]) -> str:
    """Median time and, with repetitions that differ, their spread: `12.3 (11.9-13.0)`."""
    if row["step_s"] is None:
        return "-"
    low, high = digits(min(row["samples_s"]) * 1e3), digits(max(row["samples_s"]) * 1e3)
    return digits(row["step_s"] * 1e3) + (f" ({low}-{high})" if low != high else "")


def digits(value: float) -> str:
    """At least three significant digits, whole from a thousand on; 0 as 0."""
    return f"{value:.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    if value >= 1000 or value == 0:
        return 0
    return 1 if value >= 100 else 2 if value >= 1 else 2 - math.floor(math.log10(value))


def _plain(value: Any) -> str:
    return "-" if value is None else str(value)


def _scaled(unit: float) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else digits(value / unit)


COLUMNS = (
    Column("model", "model", _plain),
    Column("device", "device", _plain),
    Column("load_format", "weights", _plain),
    Column("backend", "backend", _plain),
    Column("config", "config", _plain),
    Column("offloaded_bytes", "offloaded GiB", _scaled(GIB), True),
    Column("device_bytes", "device GiB", _scaled(GIB), True),
    Column("slot_bytes", "slots GiB", _scaled(GIB)),
    Column("batch", "batch", _plain),
    Column("test", "test", _plain),
    Column("tokens_per_s", "tok/s", _plain, True),
    Column("step_s", "step ms", _plain, True),
    Column("bound_s", "bound ms", _scaled(1e-3)),
    Column("share_of_bound", "of bound", _scaled(0.01)),
    Column("bus_bytes_per_s", "bus GB/s", _scaled(1e9), True),
    Column("stall_s", "stall ms", _scaled(1e-3)),
    Column("idle_s", "idle ms", _scaled(1e-3)),
    Column("tokens", "tokens", _plain),
    Column("note", "note", _plain),
)
PERCENT = frozenset({"share_of_bound"})


def cell(column: Column, row: dict[str, Any]) -> str:
    """The text of one cell."""
    if column.field == "tokens_per_s":
        return speed(row)
    if column.field == "step_s":
        return step_ms(row)
    if column.field == "config":
        return "-" if row["config"] is None and row["backend"] != "none" else short_config(row["config"])
    text = column.text(row[column.field])
    return f"{text} %" if column.field in PERCENT and text != "-" else text


def short_config(config: str | None) -> str:
    """A configuration in the few words that tell it from others: `uva 0.13 GiB`, `prefetch 2 of 8, step 1`."""
    if config is None:
        return "no offload"
    value = json.loads(config)
    uva, prefetch = value.get("uva", {}), value.get("prefetch", {})
    group = prefetch.get("offload_group_size", 0)
    if value.get("offload_backend", "auto") != "uva" and group:
        count, step = prefetch.get("offload_num_in_group", 1), prefetch.get("offload_prefetch_step", 1)
        text, selectors = f"prefetch {count} of {group}, step {step}", prefetch.get("offload_params", ())
    else:
        text, selectors = f"uva {uva.get('cpu_offload_gb', 0):.4g} GiB", uva.get("cpu_offload_params", ())
    return f"{text} of {'+'.join(sorted(selectors))}" if selectors else text


def same_everywhere(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Heading -> text of the columns that have one value in all rows and are not results; empty texts left out."""
    shared = {}
    for column in COLUMNS:
        texts = {cell(column, row) for row in rows}
        if not column.is_result and len(texts) == 1:
            text = texts.pop()
            if text not in ("", "-"):
                shared[column.heading] = text
    return shared


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table: one line that says what all rows share, then the columns that vary or are results."""
    if not rows:
        return "no rows"
    shared = [f"{heading} {text}" for heading, text in same_everywhere(rows).items()]
    kept = [c for c in COLUMNS if c.is_result or len({cell(c, row) for row in rows}) > 1]
    cells = [[column.heading for column in kept], *([cell(column, row) for column in kept] for row in rows)]
    width = [max(len(line[index]) for line in cells) for index in range(len(kept))]
    numeric = [column.text is not _plain or column.is_result for column in kept]
    lines = [
        "| " + " | ".join(_aligned(*item) for item in zip(line, width, numeric, strict=True)) + " |" for line in cells
    ]
    rule = (
        "|" + "|".join("-" * (w + 1) + (":" if right else "-") for w, right in zip(width, numeric, strict=True)) + "|"
    )
    head = [f"In every row: {', '.join(shared)}.", ""] if shared else []
    return "\n".join([*head, lines[0], rule, *lines[1:]])


def _aligned(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """All columns, raw values; the samples as one JSON list."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, SCHEMA, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "samples_s": json.dumps(row["samples_s"])} for row in rows)
    return buffer.getvalue().rstrip("\n")


def render(
    form: str, rows: Sequence[Row], card: dict[str, Any], title: str, notes: Sequence[str] = ()
) -> Iterator[str]:
    """Yield what goes to stdout for `-o form`.

    Args:
        form: one of `FORMATS`.
        rows: what was measured.
        card: the machine, from `bench.machine.machine`.
        title: first line of the md form.
        notes: what a reader of the md form must know before the table: the bound, what kind of times these are.
    """
    values = [row.as_dict() for row in rows]
    if form == "json":
        yield json.dumps({"machine": card, "rows": values}, indent=1, allow_nan=False)
    elif form == "jsonl":
        yield from (json.dumps(value, allow_nan=False) for value in values)
    elif form == "csv":
        yield as_csv(values)
    else:
        yield "\n".join([f"# {title}", "", f"Machine: {describe(card)}.", *notes, ""])
        yield markdown(values)
