"""Both normalisations and their hand-written gradients against plain torch."""

import pytest
import torch

from perilune.kda.normalize import L2_EPSILON, l2_normalize, rms_norm


def plain_l2(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)


def plain_rms(x, weight, epsilon):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def test_gradcheck_of_the_l2_norm():
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(l2_normalize, (x,))
    # Near zero, where the epsilon decides.
    small = (1e-3 * torch.randn(4, 3, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(l2_normalize, (small,), eps=1e-8, atol=1e-3)


@pytest.mark.parametrize("epsilon", [1e-5, 0.3])
def test_gradcheck_of_the_rms_norm(epsilon):
    x, weight = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, epsilon), (x, weight))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_values_and_gradients_equal_plain_torch(dtype, tolerance):
    x, weight = torch.randn(7, 3, 16, dtype=dtype, requires_grad=True), torch.randn(16, dtype=dtype, requires_grad=True)
    grad = torch.randn(7, 3, 16, dtype=dtype)
    pairs = (
        (l2_normalize(x), plain_l2(x), (x,)),
        (rms_norm(x, weight, 1e-5), plain_rms(x, weight, 1e-5), (x, weight)),
    )
    for value, expected, inputs in pairs:
        assert value.dtype == dtype
        assert (value - expected).abs().max() < tolerance
        for a, b in zip(torch.autograd.grad(value, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
            assert a.dtype == dtype
            assert (a - b).abs().max() < 20 * tolerance


def test_bf16_is_normalised_in_fp32_and_rounded_once():
    x, weight = torch.randn(50, 32).bfloat16().requires_grad_(), torch.randn(32).bfloat16().requires_grad_()
    wide, wide_weight = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    for value, expected in ((l2_normalize(x), plain_l2(wide)), (rms_norm(x, weight, 1e-5), plain_rms(wide, wide_weight, 1e-5))):
        assert value.dtype == torch.bfloat16
        # Half a unit in the last of 8 bits: what one rounding costs.
        assert ((value.float() - expected).abs() <= 2**-8 * expected.abs() * 1.001).all()
        value.float().square().sum().backward()
        expected.square().sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert torch.allclose(weight.grad.float(), wide_weight.grad, rtol=0.02, atol=0.02)


def test_bf16_activations_may_meet_an_fp32_weight():
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(8)
    y = rms_norm(x, weight, 1e-5)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), plain_rms(x.float(), weight, 1e-5), rtol=2**-7, atol=0)


def test_a_zero_row_becomes_zero_with_a_finite_gradient():
    x = torch.zeros(1, 4, requires_grad=True)
    for y in (l2_normalize(x), rms_norm(x, torch.ones(4), 1e-5)):
        assert torch.equal(y, torch.zeros(1, 4))
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert grad.isfinite().all()


def test_strided_views_are_normalised_like_their_copies():
    x = torch.randn(4, 6, 5).transpose(0, 1)
    assert torch.allclose(l2_normalize(x), l2_normalize(x.contiguous()), rtol=1e-6, atol=0)
    assert torch.allclose(rms_norm(x, torch.ones(5), 1e-5), rms_norm(x.contiguous(), torch.ones(5), 1e-5), rtol=1e-6, atol=0)


def test_autocast_changes_no_bit_of_a_gradient():
    x, weight, grad = torch.randn(9, 16, requires_grad=True), torch.randn(16, requires_grad=True), torch.randn(9, 16)
    expected = torch.autograd.grad(rms_norm(x, weight, 1e-5), (x, weight), grad)
    with torch.autocast("cpu", torch.bfloat16):
        for value, reference in zip(torch.autograd.grad(rms_norm(x, weight, 1e-5), (x, weight), grad), expected, strict=True):
            assert torch.equal(value, reference)
