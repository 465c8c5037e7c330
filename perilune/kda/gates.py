"""The two decay gates of KDA: raw projections to the logarithm of the per-channel retention.

Kimi Linear (arXiv 2510.26692): g = -exp(A_log) * softplus(raw + dt_bias), without a lower bound.
Kimi K3 (arXiv 2607.24653, section 2.1): g = lower_bound * sigmoid(exp(A_log) * (raw + dt_bias)), so that g lies in
(lower_bound, 0) and sixteen steps of it stay inside the range of bf16. The bound replaces softplus; it is not a clamp.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def log_decay(raw: Tensor, A_log: Tensor | None, dt_bias: Tensor | None = None, lower_bound: float | None = None) -> Tensor:
    """Log-decay g [..., heads, key_dim] of raw gate projections of the same shape, in fp32 (fp64 for fp64 inputs).

    `A_log` [heads] and `dt_bias` [heads * key_dim] are the layer's parameters. With `lower_bound` the K3 gate is used and
    `A_log` may be None (slope one); without it the Kimi Linear gate, which needs `A_log`.

    Raises ValueError when neither `A_log` nor `lower_bound` is given, or `lower_bound` is not negative.
    """
    heads, key_dim = raw.shape[-2:]
    z = raw if raw.dtype == torch.float64 else raw.float()
    if dt_bias is not None:
        z = z + dt_bias.view(heads, key_dim).to(z.dtype)
    slope = None if A_log is None else A_log.to(z.dtype).view(heads, 1).exp()
    if lower_bound is None:
        if slope is None:
            raise ValueError("the softplus gate needs A_log; give A_log, or lower_bound for the bounded gate")
        return -slope * F.softplus(z)
    if lower_bound >= 0:
        raise ValueError(f"lower_bound is the smallest log-decay of one step and must be negative, got {lower_bound}")
    return lower_bound * torch.sigmoid(z if slope is None else slope * z)
