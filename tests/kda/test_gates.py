"""The two gates against their formulas, and where those formulas saturate."""

import math

import pytest
import torch

from perilune.kda.gates import log_decay


def parameters(heads=3, key_dim=4, tokens=6):
    raw = 3 * torch.randn(tokens, heads, key_dim, dtype=torch.float64)
    return raw, torch.randn(heads, dtype=torch.float64), torch.randn(heads * key_dim, dtype=torch.float64)


def test_the_softplus_gate_is_minus_exp_a_times_softplus():
    raw, a_log, bias = parameters()
    g = log_decay(raw, a_log, bias)
    for t, h, d in [(0, 0, 0), (3, 1, 2), (5, 2, 3)]:
        expected = -math.exp(a_log[h]) * math.log1p(math.exp(raw[t, h, d] + bias[h * 4 + d]))
        assert g[t, h, d].item() == pytest.approx(expected, rel=1e-12)


def test_the_bounded_gate_is_the_bound_times_a_sigmoid_whose_slope_is_exp_a():
    raw, a_log, bias = parameters()
    g = log_decay(raw, a_log, bias, lower_bound=-5.0)
    for t, h, d in [(0, 0, 0), (3, 1, 2), (5, 2, 3)]:
        expected = -5.0 / (1 + math.exp(-math.exp(a_log[h]) * (raw[t, h, d] + bias[h * 4 + d])))
        assert g[t, h, d].item() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(log_decay(raw, None, bias, lower_bound=-5.0), log_decay(raw, torch.zeros(3), bias, lower_bound=-5.0))


@pytest.mark.parametrize("bound", [None, -5.0])
def test_gradients_equal_the_formulas(bound):
    raw, a_log, bias = (x.requires_grad_() for x in parameters())
    g = log_decay(raw, a_log, bias, bound)
    grad = torch.randn_like(g)
    d_raw, d_a, d_bias = torch.autograd.grad(g, (raw, a_log, bias), grad)
    x = (raw + bias.view(3, 4)).detach()
    slope = a_log.detach().exp().view(3, 1)
    if bound is None:
        expected = -slope * torch.sigmoid(x) * grad
        expected_a = (g.detach() * grad).sum((0, 2))
    else:
        s = torch.sigmoid(slope * x)
        expected = bound * s * (1 - s) * slope * grad
        expected_a = (expected * x).sum((0, 2))
    assert (d_raw - expected).abs().max() < 1e-12
    assert (d_a - expected_a).abs().max() < 1e-11
    assert (d_bias - expected.sum(0).flatten()).abs().max() < 1e-12
    assert torch.autograd.gradcheck(lambda *p: log_decay(*p, bound), (raw, a_log, bias))


@pytest.mark.parametrize("a_log", [-20.0, 0.0, 20.0])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_saturated_gates_and_their_gradients_are_finite(a_log, bound):
    raw = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4]).view(5, 1, 1).requires_grad_()
    slope = torch.full((1,), a_log, requires_grad=True)
    g = log_decay(raw, slope, None, bound)
    assert g.isfinite().all()
    assert (g <= 0).all()
    assert bound is None or (g >= bound).all()
    for grad in torch.autograd.grad(g.sum(), (raw, slope)):
        assert grad.isfinite().all()


def test_narrow_projections_are_gated_in_fp32():
    raw, a_log, bias = (x.bfloat16() for x in parameters())
    g = log_decay(raw, a_log, bias, -5.0)
    assert g.dtype == torch.float32
    assert torch.equal(g, log_decay(raw.float(), a_log.float(), bias.float(), -5.0))
    assert log_decay(raw.double(), a_log, bias).dtype == torch.float64


def test_batch_axes_in_front_are_free():
    raw, a_log, bias = parameters()
    assert torch.equal(log_decay(raw.view(2, 3, 3, 4), a_log, bias), log_decay(raw, a_log, bias).view(2, 3, 3, 4))


def test_a_gate_without_its_parameters_is_refused():
    raw = torch.zeros(1, 1, 2)
    with pytest.raises(ValueError, match="the softplus gate needs A_log"):
        log_decay(raw, None)
    for bound in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"must be negative, got {bound}"):
            log_decay(raw, torch.zeros(1), lower_bound=bound)
