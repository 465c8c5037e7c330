"""The two normalisations of the network: L2 of queries and keys, RMS with a weight. By hand, so that each is few passes over memory.

y = x r w,   r = 1 / sqrt(sum x^2 / count + epsilon)        dx = r (g w) - x r^3 sum(x g w) / count
"""

from typing import Any

import torch
from torch import Tensor

from perilune.kda.autocast import without_autocast

L2_EPSILON = 1e-6


class _Normalize(torch.autograd.Function):
    """x [..., width] scaled by r over the last axis, times `weight` [width] if given; `count` is width for RMS, 1 for L2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float, count: int) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        scale = torch.rsqrt(norm.square_().div_(count).add_(epsilon))
        y = x * scale if weight is None else (x * scale).mul_(weight.to(dtype))
        ctx.save_for_backward(x, scale, weight)
        ctx.count = count
        return y.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, scale, weight = ctx.saved_tensors
        wide, source = grad.to(scale.dtype), x.to(scale.dtype)
        grad_weight = None
        if weight is not None:
            grad_weight = ((source * scale) * wide).reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)
            wide = wide * weight.to(scale.dtype)
        along = torch.linalg.vecdot(source, wide).unsqueeze(-1) * scale.pow(3).div_(-ctx.count)
        return (wide * scale).addcmul_(source, along).to(x.dtype), grad_weight, None, None


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last axis, computed in fp32 (fp64 for fp64 inputs), returned in x's dtype."""
    y: Tensor = _Normalize.apply(x, None, L2_EPSILON, 1)  # type: ignore[no-untyped-call]
    return y


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean x^2 + epsilon) * weight over the last axis, computed in fp32 (fp64 for fp64 inputs), returned in x's dtype."""
    y: Tensor = _Normalize.apply(x, weight, epsilon, x.shape[-1])  # type: ignore[no-untyped-call]
    return y
