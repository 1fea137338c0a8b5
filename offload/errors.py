"""The two ways a run is refused, and the one way it is warned about."""

from typing import NamedTuple


class Fault(NamedTuple):
    """One reason why a configuration is refused.

    Attributes:
        where: dotted path of the field, empty for the whole document.
        kind: pydantic's name of the fault, such as ``greater_than_equal``.
        message: what is wrong, in the words vLLM prints.
        text: the message with its place, the value that was given and the remedy, on one line.
    """

    where: str
    kind: str
    message: str
    text: str


class OffloadConfigError(ValueError):
    """The configuration is wrong, or would offload nothing on this model; the CLI exits with 2.

    Args:
        text: every fault, on one line.
        faults: the same one by one, where the fault is in the fields.
    """

    def __init__(self, text: str, faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(text)
        self.faults = faults


class ModelLoadError(RuntimeError):
    """The model cannot be loaded with this configuration on this device; the CLI exits with 3."""


class NotEnoughMemoryError(ModelLoadError):
    """Host or device cannot give the memory that is needed; a sweep over configurations goes on with the next.

    Attributes:
        needed_bytes, free_bytes: what was asked for, and what there was.
    """

    def __init__(self, text: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(text)
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes


class OffloadConfigWarning(UserWarning):
    """A part of the configuration has no effect, or not the one it seems to have."""
