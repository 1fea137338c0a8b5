"""From rows to what a person or a program reads: collected until the end or Ctrl-C, printed, drawn, saved.

What kind of times they are (measured, of a CPU, simulated with which profile) is in the title, in the notes above the
table and in the picture's name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.machine import document, machine, portable, save
from bench.plot import save_figure, throughput_figure
from bench.rows import Row, render
from bench.subject import Subject
from offload.device import Device
from offload.virtual.profiles import Profile, load_profile


def notes_of(device: Device, profile: str | None) -> list[str]:
    """What the numbers are: measured or simulated, and what the bound was made from."""
    if device.simulated:
        return [f"Times are simulated, at the rates of {rates_text(device.profile)}.", BOUND_TEXT]
    if device.torch_device.type == "cpu":
        return [CPU_TEXT]
    if profile:
        return [f"Bound: at the rates of {rates_text(load_profile(profile))}.", BOUND_TEXT]
    return ["Bound: none, since the rates of this link are not given: add --profile FILE."]


BOUND_TEXT = "Bound: the longest of bus, device memory and FLOPs, each at its full rate."
CPU_TEXT = (
    "CPU times: host and device are one memory, so no bound applies and nothing is freed; "
    "`device` and `bus` count what a GPU would hold and what would cross its bus."
)


def rates_text(profile: Profile) -> str:
    """The rates of a profile in one line."""
    return (
        f"{profile.title}: kernel loads {profile.sm_bytes_per_s / 1e9:g} GB/s, copies "
        f"{profile.ce_bytes_per_s / 1e9:g} GB/s, device memory {profile.hbm_bytes_per_s / 1e9:g} GB/s, "
        f"16-bit {profile.half_flops_per_s / 1e12:g} TFLOP/s"
    )


def title_of(subject: Subject, device: Device) -> str:
    """What a table or picture is about, and what kind of times these are."""
    if device.simulated:
        return f"{subject.name}, simulated on {device.name.removeprefix('virtual:')}"
    return f"{subject.name} on {device.name}" + (", CPU times" if device.torch_device.type == "cpu" else "")


def picture_of(bench: str, subject: Subject, device: Device) -> Path:
    """Where a bench's picture goes if nothing else is said: model and device, or profile, in its name."""
    place = device.name.removeprefix("virtual:").removesuffix(".json").replace("/", "-").replace(":", "-")
    kind = "simulated-" if device.simulated else ""
    return Path(f"{bench}-{subject.name}-{kind}{place}.png")


@dataclass
class Outcome:
    """The rows of one run, as far as it came.

    Attributes:
        bench, argv: the command.
        title, notes: what stands above the table.
        rows: those that are done.
        is_interrupted: Ctrl-C ended it.
    """

    bench: str
    argv: Sequence[str]
    title: str
    notes: Sequence[str]
    rows: list[Row] = field(default_factory=list)
    is_interrupted: bool = False

    def collect(self, rows: Iterable[Row], expected: int, form: str) -> None:
        """Take rows as they come, with a progress bar; with `-o jsonl` each is printed at once."""
        try:
            with tqdm(total=expected, desc=self.bench, unit="row", disable=None) as bar:
                for row in rows:
                    self.rows.append(row)
                    bar.update()
                    if form == "jsonl":
                        print(*render(form, [row], {}, self.title), flush=True)
        except KeyboardInterrupt:
            self.is_interrupted = True
            print(f"interrupted: {len(self.rows)} of {expected} rows are done and kept", file=sys.stderr)

    def print(self, form: str) -> None:
        """Print what goes to stdout at the end."""
        if form != "jsonl":
            print(*render(form, self.rows, machine(), self.title, self.notes), sep="\n")

    def draw(self, path: Path) -> None:
        """Write the picture of throughput against offloaded GiB, if there is anything to show."""
        if self.rows:
            save_figure(throughput_figure(self.rows, self.title), path)
            print(f"picture {portable(str(path))}", file=sys.stderr)

    def save(self, path: Path, **more: Any) -> None:
        """Write the result document."""
        rows = [row.as_dict() for row in self.rows]
        save(document(self.bench, self.argv, rows, title=self.title, notes=list(self.notes), **more), path)
