"""The experts of a layer, written as one would explain them, in float64, and random layers to try."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from offload_kernels.expert_ops import experts_by_torch
from tests.kernels.yardstick import FLOOR, error


@dataclass
class Layer:
    """The arguments of `fused_experts`."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.w13, self.w2, self.topk_ids, self.topk_weights


def random_layer(
    T: int, E: int, H: int, inner: int, k: int, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> Layer:
    """A layer whose tokens have k distinct experts each, with weights that do not add up to one."""
    w13 = torch.randn(E, 2 * inner, H, dtype=torch.float64) / H**0.5
    w2 = torch.randn(E, H, inner, dtype=torch.float64) / inner**0.5
    ids = torch.rand(T, E).argsort(dim=1)[:, :k].contiguous()
    data = [torch.randn(T, H).to(dtype), w13.to(dtype), w2.to(dtype), ids, torch.rand(T, k)]
    return Layer(*(each.to(device) for each in data))


def exact(layer: Layer) -> torch.Tensor:
    """Token by token and expert by expert, in float64; ids out of range add nothing."""
    x, w13, w2 = (each.double() for each in (layer.x, layer.w13, layer.w2))
    out = torch.zeros_like(x)
    for t, (ids, weights) in enumerate(zip(layer.topk_ids.tolist(), layer.topk_weights.double(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if 0 <= expert < w13.shape[0]:
                gate, up = (w13[expert] @ x[t]).chunk(2)
                out[t] += weight * (w2[expert] @ (F.silu(gate) * up))
    return out


def assert_accurate(y: torch.Tensor, layer: Layer) -> None:
    """At most twice the error of torch's own products in the same dtype, on the device of x."""
    layer = Layer(*(each.to(layer.x.device) for each in layer.arguments()))
    reference = exact(layer)
    assert y.shape == layer.x.shape and y.dtype == layer.x.dtype
    # Torch's fp32 product of a single row is unusually exact, and few tokens may cancel: it is also measured on many.
    E, double, H = layer.w13.shape
    many = random_layer(64, E, H, double // 2, layer.topk_ids.shape[1], layer.x.dtype, layer.x.device)
    torchs = (
        error(experts_by_torch(*many.arguments()), exact(many)),
        error(experts_by_torch(*layer.arguments()), reference),
    )
    allowed = max(2 * max(torchs), FLOOR)
    measured = error(y, reference)
    assert measured <= allowed, f"relative error {measured:.3g}, allowed {allowed:.3g}"
