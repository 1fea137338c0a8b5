"""Which kernel a linear layer takes: a function of shapes and constants, never of a measurement made at run time."""

from typing import NamedTuple, Protocol

import torch

from offload_kernels.tiles import SKINNY_ROWS

SCHEDULES = ("skinny", "wide", "staged")

# Above this many rows, hiding the product behind the bus needs most of the GPU's tensor rate, which an ordinary GEMM
# reaches and the wide kernel, bound to one program per rows of W, does not.
WIDE_ROWS = 2048

# A weight smaller than this is over before two chunks of the staged schedule overlap.
STAGED_BYTES = 32 << 20

# Share of its link that a schedule is expected to reach: kernel loads in `skinny` and `wide`, the copy engine in
# `staged`.
KERNEL_SHARE = 0.95
COPY_SHARE = 0.93


class Rates(Protocol):
    """What `choose_schedule` needs of `LinkRates`: bytes per second of kernel loads and of the copy engine."""

    @property
    def sm_bytes_per_s(self) -> float: ...

    @property
    def ce_bytes_per_s(self) -> float: ...


class GivenRates(NamedTuple):
    """Rates as the operators carry them: two numbers."""

    sm_bytes_per_s: float
    ce_bytes_per_s: float

    @classmethod
    def of(cls, sm_bytes_per_s: float | None, ce_bytes_per_s: float | None) -> "GivenRates | None":
        """None unless both were passed."""
        return None if sm_bytes_per_s is None or ce_bytes_per_s is None else cls(sm_bytes_per_s, ce_bytes_per_s)


def choose_schedule(M: int, N: int, K: int, dtype: torch.dtype, rates: Rates | None = None) -> str:
    """Choose the schedule of one product of x (M, K) with a weight (N, K).

    Args:
        M: Rows of x.
        N: Rows of the weight.
        K: Columns of both.
        dtype: Of the weight.
        rates: What the link does on this machine, in bytes/s; without them kernel loads count as fast as the copy
            engine.

    Returns:
        ``skinny``, ``wide`` or ``staged``.
    """
    large = N * K * dtype.itemsize >= STAGED_BYTES
    copies_win = rates is not None and COPY_SHARE * rates.ce_bytes_per_s > KERNEL_SHARE * rates.sm_bytes_per_s
    if large and (copies_win or M > WIDE_ROWS):
        return "staged"
    return "skinny" if M <= SKINNY_ROWS else "wide"
