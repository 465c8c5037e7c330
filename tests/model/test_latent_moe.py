"""The feed-forward layers against loops over tokens and experts."""

import math

import pytest
import torch

from perilune.model.latent_moe import GatedMLP, LatentMoE
from perilune.moe.router import Routing
from tests.model.tiny_models import k3_config, kimi_linear_config, random_model

CONFIGS = {
    "k3": k3_config(),
    "kimi-linear": kimi_linear_config(),
    "no shared experts": k3_config(num_shared_experts=0),
    "weights not renormalised": kimi_linear_config(renormalize=False),
    "up branch not capped": k3_config(situ_linear_beta=None),
}


def moe_of(config) -> LatentMoE:
    return random_model(config).layers[1].mlp


def activation(config, gate, up):
    sigmoid = 1 / (1 + torch.exp(-gate))
    if config.situ_beta is None:
        return gate * sigmoid * up
    capped = up if config.situ_linear_beta is None else config.situ_linear_beta * torch.tanh(up / config.situ_linear_beta)
    return config.situ_beta * torch.tanh(gate / config.situ_beta) * sigmoid * capped


def mlp(config, x, layer: GatedMLP):
    return activation(config, x @ layer.gate_proj.weight.T, x @ layer.up_proj.weight.T) @ layer.down_proj.weight.T


def by_equations(config, layer: LatentMoE, x, chosen=None):
    """Each token through its own experts; `chosen` [tokens, top_k] overrides the choice."""
    rows = []
    for t in range(len(x)):
        scores = torch.sigmoid(layer.gate.weight @ x[t])
        experts = torch.topk(scores + layer.selection_bias, config.num_experts_per_token).indices if chosen is None else chosen[t]
        weights = scores[experts]
        if config.renormalize:
            weights = weights / weights.sum()
        inner = x[t] if config.routed_latent_size is None else layer.routed_expert_down_proj.weight @ x[t]
        y = torch.zeros_like(inner)
        width = config.moe_intermediate_size
        for weight, e in zip(weights * config.routed_scaling_factor, experts, strict=True):
            gate, up = layer.experts_gate_up[e, :width] @ inner, layer.experts_gate_up[e, width:] @ inner
            y = y + weight * (layer.experts_down[e] @ activation(config, gate, up))
        if config.routed_latent_size is not None:
            y = y / (y.square().mean() + 1e-5).sqrt() * layer.routed_expert_norm.weight
            y = layer.routed_expert_up_proj.weight @ y
        rows.append(y + mlp(config, x[t], layer.shared_experts) if config.num_shared_experts else y)
    return torch.stack(rows)


@torch.inference_mode()
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_experts_equal_a_loop_over_tokens_and_experts(config):
    layer, x = moe_of(config), torch.randn(11, 16, dtype=torch.float64)
    assert (layer(x, None, None) - by_equations(config, layer, x)).abs().max() < 1e-12


@torch.inference_mode()
@pytest.mark.parametrize("config", [CONFIGS["k3"], CONFIGS["kimi-linear"]], ids=["k3", "kimi-linear"])
def test_the_dense_mlp_equals_its_formula(config):
    layer, x = random_model(config).layers[0].mlp, 3 * torch.randn(5, 16, dtype=torch.float64)
    assert isinstance(layer, GatedMLP)
    assert layer.gate_proj.weight.shape == (20, 16)
    assert (layer(x) - mlp(config, x, layer)).abs().max() < 1e-12


@torch.inference_mode()
def test_the_selection_bias_chooses_experts_and_leaves_their_weights_alone():
    config = CONFIGS["k3"]
    layer, x = moe_of(config), torch.randn(6, 16, dtype=torch.float64)
    layer.selection_bias.zero_()
    layer.selection_bias[[1, 4]] = 10.0
    seen: list[Routing] = []
    y = layer(x, lambda _, routing: seen.append(routing), None)
    assert (seen[0].experts.sort(-1).values == torch.tensor([1, 4])).all()
    layer.selection_bias[[1, 4]] = 20.0
    assert torch.equal(layer(x, None, None), y)
    assert (y - by_equations(config, layer, x)).abs().max() < 1e-12


@torch.inference_mode()
def test_replayed_experts_are_used_whatever_the_scores_say():
    config = CONFIGS["k3"]
    layer, x = moe_of(config), torch.randn(6, 16, dtype=torch.float64)
    chosen = torch.tensor([[0, 5], [5, 0], [2, 3], [1, 2], [4, 1], [3, 4]])
    seen: list[Routing] = []
    y = layer(x, lambda _, routing: seen.append(routing), chosen)
    assert torch.equal(seen[0].experts, chosen)
    assert (y - by_equations(config, layer, x, chosen)).abs().max() < 1e-12


@torch.inference_mode()
def test_the_observer_hears_the_layers_number_scores_and_the_next_best_score():
    config = CONFIGS["k3"]
    model = random_model(config)
    x = torch.randn(6, 16, dtype=torch.float64)
    for layer in (1, 3):
        moe = model.layers[layer].mlp
        heard = []
        moe(x, lambda *event, heard=heard: heard.append(event), None)
        ((index, routing),) = heard
        assert index == layer - 1
        scores = torch.sigmoid(x @ moe.gate.weight.T)
        assert (routing.scores - scores).abs().max() < 1e-12
        third = (scores + moe.selection_bias).sort(-1, descending=True).values[:, 2]
        assert (routing.cutoff - third).abs().max() < 1e-12


def test_the_router_learns_from_the_combine_weights_and_the_bias_is_no_parameter():
    layer, x = moe_of(CONFIGS["k3"]), torch.randn(6, 16, dtype=torch.float64)
    layer(x, None, None).square().sum().backward()
    assert layer.gate.weight.grad.abs().max() > 0
    assert "selection_bias" not in dict(layer.named_parameters())
    assert not layer.selection_bias.requires_grad


@torch.inference_mode()
def test_output_stays_finite_where_swiglu_would_explode():
    layer = moe_of(CONFIGS["k3"])
    y = layer(torch.full((1, 16), 1e6, dtype=torch.float64), None, None)
    width, hidden = 2 * 8, 16
    shared_limit = 4 * 25 * width * layer.shared_experts.down_proj.weight.abs().max()
    routed_limit = 12 * layer.routed_expert_up_proj.weight.abs().max() * layer.routed_expert_norm.weight.abs().max() * math.sqrt(12)
    assert y.shape == (1, hidden)
    assert y.abs().max() <= shared_limit + routed_limit


@torch.inference_mode()
def test_no_tokens_are_fine():
    assert moe_of(CONFIGS["k3"])(torch.zeros(0, 16, dtype=torch.float64), None, None).shape == (0, 16)


def test_casting_the_module_leaves_the_selection_bias_in_fp32_with_its_digits():
    moe = moe_of(k3_config())
    bias = torch.randn_like(moe.selection_bias)
    moe.selection_bias.copy_(bias)
    moe = moe.to(torch.bfloat16).to(torch.float64)
    assert moe.gate.weight.dtype == torch.float64
    assert moe.selection_bias.dtype == torch.float32 and torch.equal(moe.selection_bias, bias)
