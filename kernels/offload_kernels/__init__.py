"""GEMM kernels that read weights from page-locked host memory over the bus, every byte once, for any number of rows.

Needs torch and triton alone. Everything below is resolved on first use, so that importing the package costs nothing
and works without a GPU and without triton: on CPU tensors `linear` is torch's own product.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload_kernels.dense import check_weight, linear
    from offload_kernels.experts import check_routing, fused_experts, grouped_linear
    from offload_kernels.link import LinkRates, probe
    from offload_kernels.memory import device_view, is_host_resident, page_lock
    from offload_kernels.schedule import choose_schedule

# No module may bear the name of something public in it: importing the module would replace the name in this package.
_HOME = {
    "linear": "dense",
    "check_weight": "dense",
    "choose_schedule": "schedule",
    "fused_experts": "experts",
    "grouped_linear": "experts",
    "check_routing": "experts",
    "probe": "link",
    "LinkRates": "link",
    "page_lock": "memory",
    "device_view": "memory",
    "is_host_resident": "memory",
}
__all__ = [
    "LinkRates",
    "check_routing",
    "check_weight",
    "choose_schedule",
    "device_view",
    "fused_experts",
    "grouped_linear",
    "is_host_resident",
    "linear",
    "page_lock",
    "probe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
