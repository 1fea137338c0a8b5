"""Which configurations a bench runs: budgets, pasted configs, and the arm that frees the same memory another way.

A prefetch configuration frees its offloaded bytes less its slots. Comparing it with "no offload" flatters nobody, and
comparing it with a uva budget of the same offloaded bytes gives it more device memory: the fair opponent is the uva
budget that frees what it frees.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from bench.machine import GIB
from offload.config import OffloadConfig
from offload.plan import ParameterSpec, plan

DEFAULT_STEPS = 5
NO_OFFLOAD = OffloadConfig()


def budget(gib: float) -> OffloadConfig:
    """The uva configuration with this budget, refused as any other; 0 is no offload."""
    return OffloadConfig.of({"uva": {"cpu_offload_gb": gib}}) if gib else NO_OFFLOAD


def default_budgets(offloadable_bytes: int, steps: int = DEFAULT_STEPS) -> list[float]:
    """Budgets in GiB from 0 to everything, evenly spaced, rounded up to four digits so that the last takes all."""
    budgets = [offloadable_bytes * index / steps / GIB for index in range(steps + 1)]
    return [_rounded_up(value) for value in budgets]


def _rounded_up(value: float) -> float:
    if value == 0:
        return 0.0
    digits = 3 - math.floor(math.log10(value))
    up = math.ceil(value * 10**digits)
    return round(up / 10**digits, max(digits, 0))


def offloadable_bytes(specs: Iterable[ParameterSpec]) -> int:
    """Bytes of the decoder layers' parameters that an unlimited budget would offload."""
    return plan(specs, budget(2.0**30)).offloaded_bytes


def equal_memory(config: OffloadConfig, specs: Sequence[ParameterSpec]) -> OffloadConfig | None:
    """The uva budget that frees the same device memory as this prefetch configuration.

    A budget may be exceeded by one weight: the opponent has at most the same device memory, beside the few KiB through
    which uva stages a layer's vectors.

    Returns:
        None if `config` is not prefetch or frees nothing.
    """
    if config.resolved_backend != "prefetch":
        return None
    freed = plan(specs, config).freed_bytes
    return budget(freed / GIB) if freed > 0 else None


def pasteable(config: OffloadConfig) -> str | None:
    """The configuration as one line of JSON with only what differs from the defaults; None for no offload."""
    if not config.is_offloading_enabled():
        return None
    return json.dumps(_changed(config.to_dict(), NO_OFFLOAD.to_dict()))


def _changed(value: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, item in value.items():
        if item != default[key]:
            kept[key] = _changed(item, default[key]) if isinstance(item, dict) else item
    return kept


def distinct(configs: Iterable[OffloadConfig]) -> list[OffloadConfig]:
    """The configurations without those that mean the same as an earlier one."""
    seen: dict[str | None, OffloadConfig] = {}
    for config in configs:
        seen.setdefault(pasteable(config), config)
    return list(seen.values())
