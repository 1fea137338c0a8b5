"""LLM weight offloading: part of a model's weights live in page-locked host memory, chosen by one JSON object.

Importing this package imports no torch: a configuration can be read and a plan made on any machine.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Where each public name lives; it is imported when somebody asks for it.
_HOMES = {
    "OffloadConfig": "offload.config",
    "OffloadConfigError": "offload.errors",
    "OffloadConfigWarning": "offload.errors",
    "ModelLoadError": "offload.errors",
    "load": "offload.engine",
    "Engine": "offload.engine",
    "Generation": "offload.engine",
    "MemoryReport": "offload.report",
    "offload_": "offload.inplace",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
