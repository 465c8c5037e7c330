"""Feed-forward layers: the dense gated MLP, and Stable LatentMoE with shared experts (K3 report, section 2.2).

    y = Shared(x) + W_up RMSNorm( sum over chosen experts of p_i E_i(W_down x) )

The router scores the full hidden state; only the experts see the latent. Without a latent (Kimi Linear) the routed sum is added as it is.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from perilune.model.config import ModelConfig
from perilune.model.linear import linear
from perilune.model.norm import RMSNorm
from perilune.moe.activations import GatedActivation, SituGlu, SwiGlu
from perilune.moe.experts import grouped_experts
from perilune.moe.router import Routing, route, route_replayed

RoutingObserver = Callable[[int, Routing], None]
"""Called with (index among the MoE layers, routing) as each layer routes: for balancing, metrics and recording expert ids."""


def gated_activation(config: ModelConfig) -> GatedActivation:
    """SiTU-GLU or SwiGLU, as the config says."""
    return SwiGlu() if config.situ_beta is None else SituGlu(config.situ_beta, config.situ_linear_beta)


class GatedMLP(nn.Module):
    """down(activation(gate(x), up(x))): the dense layer, and all shared experts as one."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(config.hidden_size, width), linear(config.hidden_size, width)
        self.down_proj = linear(width, config.hidden_size)
        self.activation = gated_activation(config)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))
        return y


class LatentMoE(nn.Module):
    """Shared and routed experts. `experts_gate_up` [experts, 2 * width, latent] holds gate rows, then up rows; `experts_down`
    [experts, latent, width]. The selection bias is a buffer: balancing sets it, no gradient does."""

    selection_bias: Tensor

    def __init__(self, config: ModelConfig, moe_index: int) -> None:
        super().__init__()
        self.moe_index = moe_index
        self.top_k, self.renormalize, self.scaling = config.num_experts_per_token, config.renormalize, config.routed_scaling_factor
        latent = config.routed_latent_size or config.hidden_size
        self.gate = linear(config.hidden_size, config.num_experts)
        self.register_buffer("selection_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.experts_gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * config.moe_intermediate_size, latent))
        self.experts_down = nn.Parameter(torch.empty(config.num_experts, latent, config.moe_intermediate_size))
        self.has_latent = config.routed_latent_size is not None
        if self.has_latent:
            self.routed_expert_down_proj = linear(config.hidden_size, latent)
            self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps)
            self.routed_expert_up_proj = linear(latent, config.hidden_size)
        self.has_shared = config.num_shared_experts > 0
        if self.has_shared:
            self.shared_experts = GatedMLP(config, config.num_shared_experts * config.moe_intermediate_size)
        self.activation = gated_activation(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LatentMoE":
        """`module.to(dtype)` and the like: the selection bias moves with the module but stays fp32, or other experts would be chosen."""
        bias = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.selection_bias.dtype != bias.dtype:
            self.selection_bias = bias.to(self.selection_bias.device)
        return self

    def forward(self, x: Tensor, observer: RoutingObserver | None, replay: Tensor | None) -> Tensor:
        """x [tokens, hidden_size]; `replay` [tokens, top_k] forces the chosen experts (their weights still come from the scores)."""
        if replay is not None:
            routing = route_replayed(x, self.gate.weight, replay, renormalize=self.renormalize, scaling=self.scaling)
        else:
            routing = route(
                x, self.gate.weight, self.selection_bias, self.top_k,
                renormalize=self.renormalize, scaling=self.scaling, with_cutoff=observer is not None,
            )  # fmt: skip
        if observer is not None:
            observer(self.moe_index, routing)
        inner = self.routed_expert_down_proj(x) if self.has_latent else x
        # Under autocast the inner rows are narrower than the weights.
        gate_up, down = self.experts_gate_up.to(inner.dtype), self.experts_down.to(inner.dtype)
        y = grouped_experts(inner, routing.experts, routing.weights, gate_up, down, self.activation)
        if self.has_latent:
            y = self.routed_expert_up_proj(self.routed_expert_norm(y))
        return y + self.shared_experts(x) if self.has_shared else y
