"""Block Attention Residuals: each sublayer reads a learned mixture of earlier block sums instead of one running sum.

Attention Residuals (arXiv 2603.15031), block form as in K3 (arXiv 2607.24653, section 2): a token's sources are the bank of
completed block sums and the running sum of the present block; the mixture is a softmax over the sources of a fixed pseudo-query
against each RMS-normalised source. The values mixed are not normalised.
"""

import torch
from torch import Tensor, nn

from perilune.kda.autocast import without_autocast
from perilune.model.norm import RMSNorm


class AttentionResidual(nn.Module):
    """One read. The pseudo-query `proj` must start at zero: every source then has the same weight."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.norm = RMSNorm(width, epsilon)
        self.proj = nn.Parameter(torch.zeros(1, width))

    def forward(self, bank: list[Tensor], running: Tensor) -> Tensor:
        """Mixture [tokens, width] of the sources bank + [running], each [tokens, width]; the running sum itself for an empty bank."""
        if not bank:
            return running
        mixture: Tensor = _Mix.apply(self.norm.weight * self.proj[0], self.norm.epsilon, running, *bank)  # type: ignore[no-untyped-call]
        return mixture


class _Mix(torch.autograd.Function):
    """softmax over sources of (query . rms-normalised source), times the sources. By hand, because autograd would keep
    several copies of every source for each of the two reads of each layer."""

    @staticmethod
    @without_autocast
    def forward(ctx, query: Tensor, epsilon: float, *sources: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        query = query.to(dtype)
        inverse_rms = torch.stack([_inverse_rms(s, dtype, epsilon) for s in sources])
        logits = torch.stack([s.to(dtype) @ query for s in sources]) * inverse_rms
        weights = torch.softmax(logits, 0)
        out = sources[0] * weights[0].unsqueeze(-1)
        for source, weight in zip(sources[1:], weights[1:], strict=True):
            out.addcmul_(source.to(dtype), weight.unsqueeze(-1))
        ctx.save_for_backward(query, inverse_rms, logits, weights, *sources)
        return out.to(sources[0].dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        query, inverse_rms, logits, weights, *sources = ctx.saved_tensors
        wide = grad.to(query.dtype)
        grad_weights = torch.stack([torch.linalg.vecdot(wide, s.to(query.dtype)) for s in sources])
        grad_logits = weights * (grad_weights - (weights * grad_weights).sum(0))
        # logit = r * (s . query), r = 1 / rms(s): d logit / d s = r * query - logit * r^2 * s / width.
        along_query = grad_logits * inverse_rms
        along_source = -grad_logits * logits * inverse_rms.square() / wide.shape[-1]
        grad_query = torch.zeros_like(query)
        grad_sources = []
        for i, source in enumerate(sources):
            source = source.to(query.dtype)
            grad_query.addmv_(source.t(), along_query[i])
            g = torch.outer(along_query[i], query)
            g.addcmul_(wide, weights[i].unsqueeze(-1)).addcmul_(source, along_source[i].unsqueeze(-1))
            grad_sources.append(g.to(grad.dtype))
        return grad_query, None, *grad_sources


def _inverse_rms(source: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    """1 / sqrt(mean source^2 + epsilon) for each token."""
    norm = torch.linalg.vector_norm(source, dim=-1, dtype=dtype)
    return torch.rsqrt(norm.square() / source.shape[-1] + epsilon)
