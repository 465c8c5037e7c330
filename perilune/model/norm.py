"""RMSNorm with one learned weight, computed in at least fp32."""

import torch
from torch import Tensor, nn

from perilune.kda.normalize import rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + epsilon) * weight over the last axis of size `width`."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)
