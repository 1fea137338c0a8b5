"""The bound of a step: the least time in which its bytes and FLOPs can pass, if every resource works at its rate all
the time.

A pure function of counts and rates, so that measured and simulated steps are held against the same line. Give
integers and fractions and the result is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Number = int | float | Fraction
Resource = Literal["kernel loads", "copies", "bus", "device memory", "FLOPs"]


@dataclass(frozen=True)
class Traffic:
    """What one step moves and computes.

    Attributes:
        sm_bytes: host bytes read by kernels in place.
        ce_bytes: host bytes copied by the copy engine.
        hbm_bytes: bytes read and written in device memory.
        flops: at the 16-bit rate (32-bit FLOPs scaled to the time they take).
    """

    sm_bytes: Number = 0
    ce_bytes: Number = 0
    hbm_bytes: Number = 0
    flops: Number = 0

    @property
    def bus_bytes(self) -> Number:
        return self.sm_bytes + self.ce_bytes


@dataclass(frozen=True)
class Rates:
    """What a machine can do at best; `sm` and `ce` are the bus as kernel loads and as the copy engine see it."""

    sm_bytes_per_s: Number
    ce_bytes_per_s: Number
    hbm_bytes_per_s: Number
    flops_per_s: Number

    @property
    def bus_bytes_per_s(self) -> Number:
        return max(self.sm_bytes_per_s, self.ce_bytes_per_s)


@dataclass(frozen=True)
class Bound:
    """The least time of a step and the resource that sets it.

    Attributes:
        bound_s: with each byte at the rate of the way that it really took.
        bound_fastest_link_s: with all bus bytes at the faster of the two ways, so that backends can be compared.
        resource: what sets `bound_s`.
        terms_s: every resource's own time.
    """

    bound_s: Number
    bound_fastest_link_s: Number
    resource: Resource
    terms_s: dict[Resource, Number]


def bound(traffic: Traffic, rates: Rates) -> Bound:
    """Return the bound of a step.

    Args:
        traffic: bytes and FLOPs of the step.
        rates: of the machine, in bytes/s and FLOPs/s.
    """
    terms: dict[Resource, Number] = {
        "kernel loads": _divide(traffic.sm_bytes, rates.sm_bytes_per_s),
        "copies": _divide(traffic.ce_bytes, rates.ce_bytes_per_s),
        "bus": _divide(traffic.bus_bytes, rates.bus_bytes_per_s),
        "device memory": _divide(traffic.hbm_bytes, rates.hbm_bytes_per_s),
        "FLOPs": _divide(traffic.flops, rates.flops_per_s),
    }
    resource = max(terms, key=lambda name: terms[name])
    fastest = max(terms["bus"], terms["device memory"], terms["FLOPs"])
    return Bound(terms[resource], fastest, resource, terms)


def _divide(amount: Number, rate: Number) -> Number:
    exact = not isinstance(amount, float) and not isinstance(rate, float)
    return Fraction(amount) / Fraction(rate) if exact else amount / rate
