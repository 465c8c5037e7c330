"""How evenly the tokens were spread over the experts: the figures that a training log carries.

The dead fraction and the largest load are logged rather than the router's entropy: a run has been seen to have 94.5 % dead experts
while its normalised entropy read 0.99.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BalanceMetrics:
    """One value per MoE layer, in layer order. A layer that saw no token has violation and variation 0 and all its experts dead."""

    max_violation: tuple[float, ...]
    """MaxVio: largest load / mean load, minus 1. 0 is perfect balance, experts/top_k - 1 is collapse onto the same top_k experts."""
    coefficient_of_variation: tuple[float, ...]
    """Standard deviation of the loads (over all experts, not a sample) / mean load."""
    dead_experts: tuple[int, ...]
    """Number of experts that no token visited."""


def expert_loads(expert_ids: Tensor, num_experts: int) -> Tensor:
    """Expert ids of any shape, int64 or int32 -> how often each occurs, [num_experts] int64.

    Raises ValueError for an id outside 0..num_experts-1.
    """
    loads = torch.bincount(expert_ids.reshape(-1), minlength=num_experts) if _none_negative(expert_ids) else None
    if loads is None or loads.numel() != num_experts:
        raise ValueError(f"expert ids must be in 0..{num_experts - 1}, got {int(expert_ids.min())}..{int(expert_ids.max())}")
    return loads


def balance_metrics(loads: Tensor) -> BalanceMetrics:
    """Expert loads [layers, experts] (int64 counts) -> `BalanceMetrics`. Raises ValueError for another number of axes or no experts."""
    if loads.dim() != 2 or loads.shape[1] == 0:
        raise ValueError(f"loads must have shape [layers, experts], got {tuple(loads.shape)}")
    counts = loads.double()
    mean = counts.mean(1)
    # An unused layer has mean 0; dividing by 1 there gives the documented zeros.
    divisor = torch.where(mean > 0, mean, 1.0)
    violation = torch.where(mean > 0, counts.amax(1) / divisor - 1, 0.0)
    variation = counts.std(1, correction=0) / divisor
    return BalanceMetrics(tuple(violation.tolist()), tuple(variation.tolist()), tuple((loads == 0).sum(1).tolist()))


def _none_negative(expert_ids: Tensor) -> bool:
    return expert_ids.numel() == 0 or int(expert_ids.min()) >= 0
