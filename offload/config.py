"""The JSON object that chooses the offload: vLLM's ``OffloadConfig``, field by field.

The fields are pydantic dataclasses in lax mode, as vLLM's are, so that what is accepted, coerced and refused is the
same: ``"8"`` and ``8.0`` are 8, unknown keys are refused at every level, a bare string is not a set. Two things
differ on purpose: an infinite budget is refused here (vLLM accepts it and fails later), and every refusal is one line
that names the field, the value and the remedy.
"""

import difflib
import json
import math
import os.path
from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticKnownError

from offload.errors import Fault, OffloadConfigError
from offload.text import GIB, shortened

_STRICT_KEYS = ConfigDict(extra="forbid")


def _finite(value: float) -> float:
    # After the >= check, so that NaN keeps vLLM's message.
    if not math.isfinite(value):
        raise PydanticKnownError("finite_number")
    return value


# Validated as a set, for vLLM's messages; kept as a frozenset, so that a configuration stays as it was checked.
Selectors = Annotated[set[str], AfterValidator(frozenset)]


@dataclass(config=_STRICT_KEYS, frozen=True)
class UvaConfig:
    """Weights that kernels read in host memory, in place."""

    cpu_offload_gb: Annotated[float, Field(ge=0), AfterValidator(_finite)] = 0.0
    """Budget of weights to keep on the host, in GiB per GPU."""
    cpu_offload_params: Selectors = frozenset()
    """Selectors of the parameters to offload; empty means all."""


@dataclass(config=_STRICT_KEYS, frozen=True)
class PrefetchConfig:
    """Grouped layers whose weights are copied into device slots ahead of compute."""

    offload_group_size: Annotated[int, Field(ge=0)] = 0
    """Layers are counted in groups of this many; 0 turns prefetch off."""
    offload_num_in_group: Annotated[int, Field(ge=1)] = 1
    """The last this many layers of each group are offloaded."""
    offload_prefetch_step: Annotated[int, Field(ge=0)] = 1
    """How many offloaded layers the copy runs ahead; also the number of slots."""
    offload_params: Selectors = frozenset()
    """Selectors of the parameters to offload in those layers; empty means all."""


@dataclass(config=_STRICT_KEYS, frozen=True)
class OffloadConfig:
    """What is offloaded and how; immutable, and valid once it exists."""

    offload_backend: Literal["auto", "uva", "prefetch"] = "auto"
    """``"auto"`` is prefetch if a group size is set, else uva if a budget is set, else no offload."""
    uva: UvaConfig = Field(default_factory=UvaConfig)
    prefetch: PrefetchConfig = Field(default_factory=PrefetchConfig)

    @model_validator(mode="after")
    def _check_across_fields(self) -> "OffloadConfig":
        group, count = self.prefetch.offload_group_size, self.prefetch.offload_num_in_group
        if self.offload_backend != "prefetch" and group == 0:
            return self
        if count > group:
            raise ValueError(f"offload_num_in_group ({count}) must be <= offload_group_size ({group})")
        if self.prefetch.offload_prefetch_step < 1:
            raise ValueError(
                f"offload_prefetch_step ({self.prefetch.offload_prefetch_step}) must be >= 1 when prefetch offloading "
                "is enabled (offload_group_size > 0)"
            )
        return self

    @classmethod
    def of(cls, value: "OffloadConfig | dict[str, Any] | str | None") -> "OffloadConfig":
        """Make a configuration of whatever form a caller has it in.

        Args:
            value: a configuration, its JSON text, its fields as a dict, or None for no offload.

        Returns:
            The configuration.

        Raises:
            OffloadConfigError: the value is not a valid configuration.
        """
        if isinstance(value, cls):
            return value
        if value is None or isinstance(value, str):
            return cls.from_json(value)
        return _validated(_ADAPTER.validate_python, value)

    @classmethod
    def from_json(cls, text: str | None) -> "OffloadConfig":
        """Read a configuration from JSON text.

        Args:
            text: one JSON object; None, an empty or a blank text means no offload.

        Returns:
            The configuration.

        Raises:
            OffloadConfigError: the text is not JSON or not a valid configuration; all faults are named, in one line.
        """
        if text is None or not text.strip():
            return cls()
        return _validated(_ADAPTER.validate_json, text)

    @classmethod
    def from_argument(cls, argument: str | None) -> "OffloadConfig":
        """Read a configuration as it is written on a command line.

        Args:
            argument: JSON text, or `@FILE` for a file with it in UTF-8; None for no offload.

        Returns:
            The configuration.

        Raises:
            OffloadConfigError: the file cannot be read, or holds no valid configuration.
        """
        if argument is None or not argument.startswith("@"):
            if argument and os.path.isfile(argument):
                raise OffloadConfigError(f"{shortened(argument)} is a file and no JSON text: write @ before its name")
            return cls.from_json(argument)
        path = argument[1:]
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise OffloadConfigError(
                f"offload config file {shortened(path)} cannot be read ({reason}), name one with the JSON object"
            ) from error
        return cls.from_json(text)

    @property
    def resolved_backend(self) -> Literal["uva", "prefetch"] | None:
        """The backend that ``"auto"`` stands for, or the one that is named; None for no offload."""
        if self.offload_backend != "auto":
            return self.offload_backend
        if self._prefetch_is_set:
            return "prefetch"
        return "uva" if self._uva_is_set else None

    @property
    def reason(self) -> str:
        """Why the backend is the resolved one."""
        if self.offload_backend != "auto":
            return "offload_backend names it"
        if self._prefetch_is_set:
            return "auto, offload_group_size is above 0"
        return f"auto, cpu_offload_gb is {'above 0' if self._uva_is_set else '0 and so is offload_group_size'}"

    def is_offloading_enabled(self) -> bool:
        """Whether the resolved backend has something to do."""
        return {"uva": self._uva_is_set, "prefetch": self._prefetch_is_set, None: False}[self.resolved_backend]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Texts about settings that are ignored; at most one, and it refuses nothing."""
        backend = self.offload_backend
        if backend == "uva" and self._prefetch_is_set:
            return ("Prefetch offload fields are set but offload_backend='uva'. Prefetch settings will be ignored.",)
        if backend == "prefetch" and self._uva_is_set:
            return ("UVA offload fields are set but offload_backend='prefetch'. UVA settings will be ignored.",)
        if backend == "auto" and self._prefetch_is_set and self._uva_is_set:
            return (
                "Both UVA and prefetch offload fields are set with offload_backend='auto'. Prefetch backend will be "
                "selected. Set offload_backend explicitly to suppress this warning.",
            )
        return ()

    @property
    def budget_bytes(self) -> int:
        """The uva budget in bytes, rounded down; exact however large the number of GiB."""
        return int(Fraction(self.uva.cpu_offload_gb) * GIB)

    @property
    def selectors(self) -> tuple[str, ...]:
        """The resolved backend's selectors, sorted; empty means every parameter."""
        if self.resolved_backend == "uva":
            return tuple(sorted(self.uva.cpu_offload_params))
        if self.resolved_backend == "prefetch":
            return tuple(sorted(self.prefetch.offload_params))
        return ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, selectors sorted; ``of(config.to_dict()) == config``."""
        return _as_json(self)

    def to_json(self) -> str:
        """The fields as one line of JSON text; ``from_json(config.to_json()) == config``."""
        return json.dumps(self.to_dict())

    @property
    def _uva_is_set(self) -> bool:
        return self.uva.cpu_offload_gb > 0

    @property
    def _prefetch_is_set(self) -> bool:
        return self.prefetch.offload_group_size > 0


_ADAPTER = TypeAdapter(OffloadConfig)


def _as_json(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _as_json(getattr(value, field.name)) for field in fields(value)}
    return sorted(value) if isinstance(value, frozenset) else value


def _validated(validate: Any, value: Any) -> OffloadConfig:
    try:
        return validate(value)
    except ValidationError as error:
        faults = tuple(_fault(detail) for detail in error.errors(include_url=False))
    raise OffloadConfigError("; ".join(fault.text for fault in faults), faults)


def _fault(detail: Any) -> Fault:
    where, kind, message = ".".join(map(str, detail["loc"])), detail["type"], detail["msg"]
    if kind == "value_error":
        message = str(detail["ctx"]["error"])
        return Fault(where, kind, message, message)
    text = f"{_one_line(where)}: {message}" if where else message
    if kind not in ("json_invalid", "string_unicode"):
        text += f" (got {shortened(detail['input'])})"
    if kind == "unexpected_keyword_argument":
        text += _did_you_mean(where)
    return Fault(where, kind, message, text)


def _one_line(name: str) -> str:
    return shortened(name)[1:].removesuffix('"')


def _did_you_mean(where: str) -> str:
    section, _, name = where.rpartition(".")
    places = {field.name: prefix for prefix, cls in _SECTIONS.items() for field in fields(cls)}
    near = difflib.get_close_matches(name, places, n=1)
    if near:
        return f", did you mean {'.'.join(filter(None, (places[near[0]], near[0])))}?"
    return f", known here: {', '.join(name for name, place in places.items() if place == section)}"


_SECTIONS = {"": OffloadConfig, "uva": UvaConfig, "prefetch": PrefetchConfig}
