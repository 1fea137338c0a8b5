"""What counts as right for a product: at most twice the error of torch's own in the same dtype, against float64."""

import torch
import torch.nn.functional as F

FLOOR = 1e-7  # torch's error may be 0 for tiny products
_ROWS = 16  # torch's fp32 product of a single row is unusually exact


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product in float64."""
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative root-mean-square error."""
    return ((y.double() - exact).norm() / exact.norm()).item()


def bound(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """Twice torch's error on the same data, its rows repeated to a full product."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows.repeat(-(-_ROWS // rows.shape[0]), 1)
    return max(2 * error(F.linear(rows, weight, bias), reference(rows, weight, bias)), FLOOR)


def assert_accurate(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Compare a product with its float64 reference; NaN, as where nothing was written, fails."""
    exact = reference(x, weight, bias)
    assert y.shape == exact.shape and y.dtype == x.dtype
    measured, allowed = error(y, exact), bound(x, weight, bias)
    assert measured <= allowed, f"relative error {measured:.3g}, allowed {allowed:.3g}"
