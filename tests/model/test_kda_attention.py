"""The KDA layer against its equations token by token, and its state against whole sequences."""

import pytest
import torch
import torch.nn.functional as F

from perilune.kda.gates import log_decay
from perilune.model.batch import SequenceLayout
from perilune.model.kda_attention import KDAAttention
from perilune.model.state import SequenceState
from tests.model.tiny_models import k3_config, kimi_linear_config, random_model

CONFIGS = (k3_config(), kimi_linear_config())
IDS = ("k3", "kimi-linear")


def layer_of(config) -> KDAAttention:
    return random_model(config).layers[0].self_attn


def by_equations(layer: KDAAttention, x: torch.Tensor) -> torch.Tensor:
    """One sequence [tokens, hidden] through the layer's equations, one token and head at a time."""
    heads, dim = layer.heads, layer.head_dim

    def convolved(projection, kernel):
        u = x @ projection.weight.T
        rows = []
        for t in range(len(x)):
            past = [u[t - 3 + w] * kernel[:, w] for w in range(4) if t - 3 + w >= 0]
            rows.append(F.silu(torch.stack(past).sum(0)))
        return torch.stack(rows).view(-1, heads, dim)

    q, k, v = (convolved(getattr(layer, f"{n}_proj"), getattr(layer, f"{n}_conv")) for n in "qkv")
    z = (x @ layer.f_a_proj.weight.T @ layer.f_b_proj.weight.T + layer.dt_bias).view(-1, heads, dim)
    beta = 1 / (1 + torch.exp(-(x @ layer.b_proj.weight.T)))
    gate = x @ layer.g_proj.weight.T if layer.full_rank_gate else x @ layer.g_a_proj.weight.T @ layer.g_b_proj.weight.T
    gate = torch.sigmoid(gate).view(-1, heads, dim)
    out = torch.zeros(len(x), heads, dim, dtype=x.dtype)
    for h in range(heads):
        state = torch.zeros(dim, dim, dtype=x.dtype)
        slope = layer.A_log[h].exp()
        for t in range(len(x)):
            if layer.lower_bound is None:
                decay = torch.exp(-slope * torch.log1p(torch.exp(z[t, h])))
            else:
                decay = torch.exp(layer.lower_bound * torch.sigmoid(slope * z[t, h]))
            key = k[t, h] / (k[t, h].square().sum() + 1e-6).sqrt()
            query = q[t, h] / (q[t, h].square().sum() + 1e-6).sqrt() * dim**-0.5
            state = decay.unsqueeze(1) * state
            state = state + beta[t, h] * torch.outer(key, v[t, h] - key @ state)
            o = query @ state
            out[t, h] = o / (o.square().mean() + 1e-5).sqrt() * layer.o_norm.weight * gate[t, h]
    return out.flatten(1) @ layer.o_proj.weight.T


@torch.inference_mode()
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_a_ragged_batch_equals_the_equations_of_each_sequence(config):
    layer = layer_of(config)
    lengths = (19, 0, 1, 5)
    x = torch.randn(25, 16, dtype=torch.float64)
    y = layer(x, SequenceLayout(lengths), None)
    for part, expected in zip(y.split(lengths), x.split(lengths), strict=True):
        if len(part):
            assert (part - by_equations(layer, expected)).abs().max() < 1e-11


@torch.inference_mode()
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_carrying_the_state_over_any_split_equals_one_pass_and_writes_one_slot(config):
    layer = layer_of(config)
    x = torch.randn(21, 16, dtype=torch.float64)
    expected = layer(x, SequenceLayout((21,)), None)
    for cut in (0, 1, 2, 3, 16, 20, 21):
        state = SequenceState(config, 3, 32, torch.float64)
        for tensor in (state.recurrent[0], state.conv[0]):
            tensor[[0, 2]] = float("nan")
        first = layer(x[:cut], SequenceLayout((cut,), (0,), (1,)), state)
        second = layer(x[cut:], SequenceLayout((21 - cut,), (cut,), (1,)), state)
        assert (torch.cat((first, second)) - expected).abs().max() < 1e-11
        assert state.recurrent[0][[0, 2]].isnan().all()
        assert state.conv[0][[0, 2]].isnan().all()


@torch.inference_mode()
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_decoding_token_by_token_equals_one_pass(config):
    layer = layer_of(config)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    expected = layer(x.flatten(0, 1), SequenceLayout((9, 9)), None).view(2, 9, 16)
    state = SequenceState(config, 2, 32, torch.float64)
    for t in range(9):
        y = layer(x[:, t], SequenceLayout((1, 1), (t, t), (1, 0)), state)
        assert (y - expected[:, t]).abs().max() < 1e-11


@pytest.mark.parametrize("lengths", [(1, 1), (2, 1)])
def test_a_state_takes_up_no_graph_outside_inference_mode(lengths):
    config = k3_config()
    layer = layer_of(config)
    state = SequenceState(config, 2, 32, torch.float64)
    for _ in range(2):
        layer(torch.randn(sum(lengths), 16, dtype=torch.float64), SequenceLayout(lengths, (0, 0), (0, 1)), state)
    assert not state.recurrent[0].requires_grad
    assert not state.conv[0].requires_grad


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [(1, 1), (2, 1)])
def test_a_state_of_another_dtype_than_the_weights_works(lengths):
    config = k3_config()
    layer = layer_of(config).float()
    x = torch.randn(sum(lengths), 16)
    wide, narrow = SequenceState(config, 2, 32), SequenceState(config, 2, 32, torch.bfloat16)
    for state in (wide, narrow):
        layer(x, SequenceLayout(lengths, (0, 0), (0, 1)), state)
    assert torch.equal(narrow.conv[0], wide.conv[0].bfloat16())
    assert torch.equal(narrow.recurrent[0], wide.recurrent[0])


def test_retention_starts_between_0_62_and_0_996_under_the_bounded_gate():
    layer = KDAAttention(k3_config(kda_num_heads=8, kda_head_dim=64), 0)
    layer.reset_parameters()
    retention = log_decay(torch.zeros(8, 64), layer.A_log, layer.dt_bias, layer.lower_bound).exp()
    assert 0.62 < retention.min() < 0.66
    assert 0.99 < retention.max() < 0.996


def test_retention_starts_spread_over_heads_under_the_softplus_gate():
    layer = KDAAttention(kimi_linear_config(kda_num_heads=8, kda_head_dim=64), 0)
    layer.reset_parameters()
    slopes = layer.A_log.exp()
    assert ((slopes >= 1) & (slopes <= 16)).all()
    assert slopes.max() / slopes.min() > 1.5
    steps = F.softplus(layer.dt_bias)
    assert ((steps > 0.99e-3) & (steps < 0.101)).all()
