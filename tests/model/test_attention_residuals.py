"""The mixture and its hand-written gradient against the formula written in autograd."""

import pytest
import torch

from perilune.model.attention_residuals import AttentionResidual, _Mix

WIDTH, EPSILON = 6, 1e-5


def by_formula(norm_weight, proj, sources):
    """softmax over sources of proj . (rms-normalised source * norm weight), times the sources as they are."""
    stacked = torch.stack(sources)
    normalised = stacked / (stacked.square().mean(-1, keepdim=True) + EPSILON).sqrt() * norm_weight
    weights = torch.softmax(normalised @ proj, 0)
    return (weights.unsqueeze(-1) * stacked).sum(0)


def module(dtype=torch.float64):
    read = AttentionResidual(WIDTH, EPSILON).to(dtype)
    with torch.no_grad():
        read.norm.weight.copy_(1 + 0.3 * torch.randn(WIDTH))
        read.proj.copy_(torch.randn(1, WIDTH))
    return read


def sources(count, tokens=5, dtype=torch.float64):
    return [(torch.randn(tokens, WIDTH, dtype=torch.float64) * 10.0 ** (i - 1)).to(dtype).requires_grad_() for i in range(count)]


@pytest.mark.parametrize("bank_size", [1, 2, 3, 8])
def test_values_and_gradients_equal_the_formula(bank_size):
    read, values = module(), sources(bank_size + 1)
    *bank, running = values
    parameters = (read.norm.weight, read.proj)
    y = read(bank, running)
    expected = by_formula(read.norm.weight, read.proj[0], values)
    assert (y - expected).abs().max() < 1e-12 * 10**bank_size
    grad = torch.randn_like(y)
    for a, b in zip(
        torch.autograd.grad(y, (*values, *parameters), grad), torch.autograd.grad(expected, (*values, *parameters), grad), strict=True
    ):
        assert (a - b).abs().max() <= 1e-11 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_gradcheck_of_the_mixture(count):
    query = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)
    values = [torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    assert torch.autograd.gradcheck(lambda q, *s: _Mix.apply(q, 0.1, *s), (query, *values))


def test_a_zero_query_takes_the_plain_mean():
    read = AttentionResidual(WIDTH, EPSILON).double()
    values = sources(4)
    assert not read.proj.any()
    assert (read(values[:3], values[3]) - torch.stack(values).mean(0)).abs().max() < 1e-13 * 100


def test_an_empty_bank_returns_the_running_sum_itself():
    running = torch.randn(4, WIDTH)
    assert module(torch.float32)([], running) is running


def test_weights_depend_on_the_direction_of_a_source_alone_but_its_full_length_is_mixed():
    read, (a, b) = module(), sources(2)
    read.norm.epsilon = 1e-30
    y, tripled, lengthened = read([a], b), read([3 * a], 3 * b), read([100 * a], b)
    assert (tripled - 3 * y).abs().max() < 1e-12
    # With the same weights the mixture moves along `a`, by 99 times its share.
    share = (lengthened - y) / (99 * a)
    assert (share - share[:, :1]).abs().max() < 1e-10
    assert ((share > 0) & (share < 1)).all()
    assert (y - share * a - (1 - share) * b).abs().max() < 1e-10


def test_narrow_sources_are_mixed_in_fp32_and_rounded_once():
    read = module(torch.float32)
    values = sources(3, dtype=torch.bfloat16)
    y = read(values[:2], values[2])
    assert y.dtype == torch.bfloat16
    expected = by_formula(read.norm.weight, read.proj[0], [v.float() for v in values])
    assert ((y.float() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
    grads = torch.autograd.grad(y.float().sum(), (*values, read.proj))
    assert [g.dtype for g in grads] == [torch.bfloat16] * 3 + [torch.float32]
    assert all(g.isfinite().all() for g in grads)


def test_no_tokens_are_fine():
    read = module(torch.float32)
    assert read([torch.zeros(0, WIDTH)], torch.zeros(0, WIDTH)).shape == (0, WIDTH)


def test_autocast_changes_no_bit_forward_or_backward():
    read, (a, b) = module(torch.float32), sources(2, dtype=torch.float32)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = read([a], b)
            results.append((y, *torch.autograd.grad(y.square().sum(), (a, b, read.proj, read.norm.weight))))
    for value, reference in zip(*results, strict=True):
        assert torch.equal(value, reference)
