"""Hardware profiles: what the virtual GPU must know of a real one, each number with its source.

The shipped profiles are one data file beside this module; a file written from a real GPU (`python -m bench probe
--save-profile FILE`) has the same shape and is named by its path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from offload.errors import ModelLoadError
from offload.text import quoted, shortened

PICOSECONDS_PER_S = 10**12


def picoseconds(seconds: float) -> int:
    """Seconds as whole picoseconds, rounded to the nearest: for constants of a profile."""
    return round(seconds * PICOSECONDS_PER_S)


@dataclass(frozen=True)
class Profile:
    """One GPU and the link to its host.

    Attributes:
        name, title: as the user writes it; as a reader understands it.
        compute_capability: as an integer (90); decides which kernel is chosen.
        memory_bytes, host_memory_bytes: capacity of the device and of the host.
        hbm_bytes_per_s: device memory.
        half_flops_per_s, single_flops_per_s: matrix products in 16-bit and in 32-bit floats.
        sm_bytes_per_s, ce_bytes_per_s: host to device, by kernel loads and by the copy engine.
        kernel_s, copy_s: from an operator's turn in its stream until its bytes flow.
        issue_s: host time to issue one operator; graph_issue_s: to issue a captured graph, whatever its size.
        sources: field -> where its number comes from.
    """

    name: str
    title: str
    compute_capability: int
    memory_bytes: int
    host_memory_bytes: int
    hbm_bytes_per_s: int
    half_flops_per_s: int
    single_flops_per_s: int
    sm_bytes_per_s: int
    ce_bytes_per_s: int
    kernel_s: float
    copy_s: float
    issue_s: float
    graph_issue_s: float
    sources: Mapping[str, str]

    @property
    def bus_bytes_per_s(self) -> int:
        """What the link carries at most, however it is used."""
        return max(self.sm_bytes_per_s, self.ce_bytes_per_s)

    @cached_property
    def kernel_ps(self) -> int:
        return picoseconds(self.kernel_s)

    @cached_property
    def copy_ps(self) -> int:
        return picoseconds(self.copy_s)

    @cached_property
    def issue_ps(self) -> int:
        return picoseconds(self.issue_s)

    @cached_property
    def graph_issue_ps(self) -> int:
        return picoseconds(self.graph_issue_s)


_INTEGERS = {field.name for field in fields(Profile) if field.type == "int"}
_NUMBERS = {field.name for field in fields(Profile)} - {"name", "title", "sources"}
_LARGEST = 10**18
"""Of any number: far above all hardware, and whole picoseconds of it still are a float."""


def parse_profile(document: Mapping[str, Any], origin: str) -> Profile:
    """Check one profile and return it.

    Args:
        document: `{"name", "title", "numbers": {field: {"value", "source"}}}`.
        origin: the file, for messages.

    Raises:
        ModelLoadError: a number is missing, unknown, out of range or without a source.
    """
    numbers, name = document.get("numbers"), document.get("name")
    numbers = numbers if isinstance(numbers, dict) else {}
    unlike = sorted(_NUMBERS ^ set(numbers))
    if not name or not isinstance(name, str) or unlike:
        raise ModelLoadError(
            f"profile {shortened(name)} in {origin} needs a name and exactly the numbers of `Profile`; "
            f"differs in {quoted(unlike) if unlike else 'the name'}"
        )
    values: dict[str, Any] = {}
    for field, entry in numbers.items():
        value, source = (entry.get("value"), entry.get("source")) if isinstance(entry, dict) else (None, None)
        if not _fits(field, value) or not source:
            kind = "positive whole number" if field in _INTEGERS else "number of seconds"
            raise ModelLoadError(
                f"profile {shortened(name)} in {origin}: {field} must be a {kind} with a source, got {shortened(entry)}"
            )
        values[field] = int(value) if field in _INTEGERS else float(value)
    sources = {field: str(entry["source"]) for field, entry in numbers.items()}
    return Profile(name=name, title=str(document.get("title", name)), sources=sources, **values)


def _fits(field: str, value: Any) -> bool:
    """Whether a number of a file can be that field; JSON as Python reads it has NaN, infinity and booleans."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
        return False
    return value == int(value) > 0 if field in _INTEGERS else True


def shipped_profiles() -> dict[str, Profile]:
    """Every profile of the data file, by name."""
    text = resources.files(__package__).joinpath("profiles.json").read_text()
    return {document["name"]: parse_profile(document, "profiles.json") for document in json.loads(text)}


def load_profile(name: str) -> Profile:
    """Return a shipped profile by its name, or the one in a JSON file by its path.

    Raises:
        ModelLoadError: no such profile, or the file does not hold one.
    """
    if name.endswith(".json"):
        path = Path(name)
        if not path.is_file():
            raise ModelLoadError(
                f"no such profile file: {name}; `python -m bench probe --save-profile FILE` writes one"
            )
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            raise ModelLoadError(f"profile file {name} is not JSON: {error}") from error
        return parse_profile(document if isinstance(document, dict) else {}, path.name)
    known = shipped_profiles()
    if name not in known:
        raise ModelLoadError(f"no profile {name!r}; shipped are {', '.join(known)}, or give the path of a .json file")
    return known[name]


def dump_profile(profile: Profile) -> str:
    """The JSON text of a profile, as `load_profile` reads it."""
    numbers = {
        field: {"value": getattr(profile, field), "source": profile.sources[field]} for field in sorted(_NUMBERS)
    }
    return json.dumps({"name": profile.name, "title": profile.title, "numbers": numbers}, indent=2) + "\n"
