"""The sigmoid router: which experts a token visits, and with which weights.

score = σ(W x); the experts of a token are the top k of score + selection_bias; their weights come from the *unbiased* scores,
renormalised over the chosen k (K3 technical report, arXiv 2607.24653, Eq. 13; the bias is DeepSeek-V3's "noaux_tc"). The bias
steers the selection alone, so it carries no gradient: Quantile Balancing (`quantile.py`) sets it between steps.

Everything is computed in fp32 whatever the dtype of the model, and the bias must be stored in fp32: rounding it to bf16 is
known to have changed the top-8 set of 98 % of the tokens of a GLM model. An fp64 input stays fp64, for tests against fp64 references.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Where each token goes. "fp32" below is fp64 where the hidden states are fp64."""

    experts: Tensor
    """[tokens, top_k] int64, in falling order of biased score (replayed: in the recorded order)."""
    weights: Tensor
    """[tokens, top_k] fp32, from the unbiased scores; differentiable."""
    scores: Tensor
    """[tokens, experts] fp32 sigmoid scores, before the bias; differentiable."""
    cutoff: Tensor | None
    """[tokens] fp32: the (top_k + 1)-th largest biased score, which Quantile Balancing compares margins with; None if not asked for."""


def route(
    hidden: Tensor,
    weight: Tensor,
    selection_bias: Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    scaling: float = 1.0,
    with_cutoff: bool = False,
) -> Routing:
    """Chooses `top_k` experts for every token.

    `hidden` [tokens, d] and `weight` [experts, d] of any floating dtype, `selection_bias` [experts] fp32. With `renormalize` the
    weights of a token sum to `scaling` (so with top_k = 1 they are constant and the router gets no gradient from them).
    `with_cutoff` costs one more place in the top-k and needs top_k < experts.

    Raises ValueError for shapes that do not fit, a bias that is not fp32, or a top_k outside 1..experts.
    """
    return route_logits(
        router_logits(hidden, weight), selection_bias, top_k, renormalize=renormalize, scaling=scaling, with_cutoff=with_cutoff
    )


def router_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[tokens, d] and [experts, d] of any floating dtype -> logits [tokens, experts], multiplied in fp32 (fp64 if `hidden` is fp64).

    Raises ValueError when the shapes do not fit.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"the router needs hidden [tokens, d] and weight [experts, d], got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        # Autocast would turn this product into bf16 behind the two conversions.
        with torch.autocast(device, enabled=False):
            return F.linear(hidden.to(dtype), weight.to(dtype))
    return F.linear(hidden.to(dtype), weight.to(dtype))


def route_logits(
    logits: Tensor,
    selection_bias: Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    scaling: float = 1.0,
    with_cutoff: bool = False,
) -> Routing:
    """`route` from logits [tokens, experts] in fp32 or fp64, for callers that multiply with a kernel of their own."""
    _check_logits(logits)
    experts = logits.shape[1]
    if selection_bias.shape != (experts,):
        raise ValueError(f"selection_bias must have shape ({experts},), one value per expert, got {tuple(selection_bias.shape)}")
    if selection_bias.dtype != torch.float32:
        raise ValueError(f"selection_bias must be float32, got {selection_bias.dtype}: rounding it changes which experts are chosen")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be between 1 and the {experts} experts, got {top_k}")
    if with_cutoff and top_k == experts:
        raise ValueError(f"with_cutoff needs top_k < experts, got {top_k} of {experts}: there is no (top_k + 1)-th score")

    scores = torch.sigmoid(logits)
    with torch.no_grad():
        ranked = torch.topk(scores + selection_bias, top_k + int(with_cutoff), dim=-1)
    chosen = ranked.indices[:, :top_k]
    cutoff = ranked.values[:, top_k] if with_cutoff else None
    return Routing(chosen, _combine_weights(scores, chosen, renormalize, scaling), scores, cutoff)


def route_replayed(hidden: Tensor, weight: Tensor, experts: Tensor, *, renormalize: bool = True, scaling: float = 1.0) -> Routing:
    """The routing with recorded expert ids: weights and scores are computed, and differentiated, as if `route` had chosen them.

    A trainer replays the choices of the engine that sampled a rollout, because a rounding difference between the two can flip a
    choice near a tie and with it the token's log-probability. `experts` [tokens, top_k] int64 or int32; the cutoff is None.

    Raises ValueError for shapes that do not fit or an id outside 0..experts-1.
    """
    logits = router_logits(hidden, weight)
    tokens, num_experts = logits.shape
    if experts.dim() != 2 or experts.shape[0] != tokens or not 1 <= experts.shape[1] <= num_experts:
        raise ValueError(
            f"recorded experts must have shape [{tokens} tokens, top_k] with top_k in 1..{num_experts}, got {tuple(experts.shape)}"
        )
    if experts.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"recorded experts must be int64 or int32, got {experts.dtype}")
    if experts.numel():
        low, high = (int(bound) for bound in torch.aminmax(experts))
        if low < 0 or high >= num_experts:
            raise ValueError(
                f"recorded expert ids must be in 0..{num_experts - 1}, got {low}..{high}: was the rollout made by another model?"
            )
    scores = torch.sigmoid(logits)
    chosen = experts.long()
    return Routing(chosen, _combine_weights(scores, chosen, renormalize, scaling), scores, None)


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2:
        raise ValueError(f"router logits must have shape [tokens, experts], got {tuple(logits.shape)}")
    if logits.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"router logits must be float32 or float64, got {logits.dtype}: compute them with router_logits")


def _combine_weights(scores: Tensor, chosen: Tensor, renormalize: bool, scaling: float) -> Tensor:
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if scaling == 1.0 else weights * scaling
