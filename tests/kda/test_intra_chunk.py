"""Decayed products inside a chunk against the double sum that defines them, with their gradients and their limits."""

import pytest
import torch

from perilune.kda.intra_chunk import (
    LEAF,
    decay_factors,
    decayed_products,
    decayed_products_backward,
    leaf_size,
    prefix_sum,
    reverse_cumsum,
    suffix_sum,
)

BOUNDS = (None, -5.0, -0.2)
CHUNKS = (16, 32, 64)


def by_definition(q, k, g):
    """kk below and qk on and below the diagonal, every pair with the exponential of its own sum of gates."""
    chunk = k.shape[1]
    kk, qk = torch.zeros(2, k.shape[0], chunk, chunk, dtype=k.dtype)
    rows_kk, rows_qk = [], []
    for i in range(chunk):
        # Sums of the steps j+1 .. i for every j <= i, each summed from its own terms.
        decay = torch.stack([g[:, j + 1 : i + 1].sum(1) for j in range(i + 1)], 1).exp()
        row_kk = (k[:, i : i + 1] * k[:, : i + 1] * decay).sum(-1)
        row_qk = (q[:, i : i + 1] * k[:, : i + 1] * decay).sum(-1)
        rows_kk.append(torch.cat((row_kk[:, :i], kk[:, i, i:]), 1))
        rows_qk.append(torch.cat((row_qk, qk[:, i, i + 1 :]), 1))
    return torch.stack(rows_kk, 1), torch.stack(rows_qk, 1)


def inputs(chunk, bound, seed=0):
    rng = torch.Generator().manual_seed(seed)
    q, k, raw = (torch.randn(3, chunk, 5, generator=rng, dtype=torch.float64) for _ in range(3))
    return q, k, -(2 * raw).exp() if bound is None else bound * torch.sigmoid(2 * raw)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_products_equal_the_sum_over_pairs(chunk, bound):
    q, k, g = inputs(chunk, bound)
    kk, qk = decayed_products(q, k, decay_factors(g, bound))
    expected_kk, expected_qk = by_definition(q, k, g)
    assert (kk - expected_kk).abs().max() < 1e-12
    assert (qk - expected_qk).abs().max() < 1e-12


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_gradients_equal_those_of_the_sum_over_pairs(chunk, bound):
    q, k, g = (t.requires_grad_() for t in inputs(chunk, bound))
    grad_kk = torch.randn(3, chunk, chunk, dtype=torch.float64).tril(-1)
    grad_qk = torch.randn(3, chunk, chunk, dtype=torch.float64).tril()
    kk, qk = by_definition(q, k, g)
    expected = torch.autograd.grad((kk * grad_kk).sum() + (qk * grad_qk).sum(), (q, k, g))
    with torch.no_grad():
        results = decayed_products_backward(q, k, decay_factors(g, bound), grad_kk, grad_qk)
    for value, reference in zip(results, expected, strict=True):
        assert (value - reference).abs().max() < 1e-11
    # The first step of a chunk lies between no two of its tokens, so not even rounding may reach its gate.
    assert not results[2][:, 0].any()


def test_without_a_bound_a_leaf_is_one_token_and_one_strong_step_costs_no_digits():
    q, k, g = inputs(64, -0.05)
    g[:, 20] = -1000.0
    factors = decay_factors(g.float(), None)
    assert factors.rise is None
    kk, qk = decayed_products(q.float(), k.float(), factors)
    expected_kk, expected_qk = by_definition(q, k, g)
    # In fp32 a sum that had passed through -1000 would be off by 6e-5.
    assert (kk - expected_kk).abs().max() < 3e-6
    assert (qk - expected_qk).abs().max() < 3e-6
    assert not kk[:, 20:, :20].any()


@pytest.mark.parametrize("bound", [-5.0, -80.0 / 15])
def test_dense_leaves_survive_gates_at_their_bound_in_fp32(bound):
    q, k, g = inputs(64, bound)
    g.fill_(bound)
    kk, qk = decayed_products(q.float(), k.float(), decay_factors(g.float(), bound))
    expected_kk, expected_qk = by_definition(q, k, g)
    assert kk.isfinite().all()
    assert (kk - expected_kk).abs().max() < 1e-5
    assert (qk - expected_qk).abs().max() < 1e-5


def test_a_leaf_is_dense_only_where_the_bound_keeps_its_span_in_range():
    assert leaf_size(None) == 1
    assert leaf_size(-5.0) == leaf_size(-0.1) == leaf_size(-80.0 / 15) == LEAF
    assert leaf_size(-5.5) == leaf_size(-1000.0) == 1


@pytest.mark.parametrize("bound", [-6.0, -1000.0])
def test_a_bound_too_wide_for_dense_leaves_is_still_exact(bound):
    q, k, g = inputs(32, bound)
    kk, qk = decayed_products(q, k, decay_factors(g, bound))
    expected_kk, expected_qk = by_definition(q, k, g)
    assert (kk - expected_kk).abs().max() < 1e-12
    assert (qk - expected_qk).abs().max() < 1e-12


@pytest.mark.parametrize("bound", BOUNDS)
def test_later_gates_leave_the_bits_of_earlier_rows_alone(bound):
    q, k, g = (t.float() for t in inputs(64, bound))
    other = inputs(64, bound, seed=1)[2].float()
    kk, qk = decayed_products(q, k, decay_factors(g, bound))
    for kept in (1, 8, 16, 17, 40, 63):
        changed = torch.cat((g[:, :kept], other[:, kept:]), 1)
        kk_changed, qk_changed = decayed_products(q, k, decay_factors(changed, bound))
        assert torch.equal(kk_changed[:, :kept], kk[:, :kept])
        assert torch.equal(qk_changed[:, :kept], qk[:, :kept])
        assert not torch.equal(kk_changed[:, kept:], kk[:, kept:]) or kept == 63


def test_the_three_running_sums_are_what_their_names_say():
    x = torch.tensor([[1.0], [10.0], [100.0]])
    assert suffix_sum(x).flatten().tolist() == [110, 100, 0]
    assert prefix_sum(x).flatten().tolist() == [0, 1, 11]
    assert reverse_cumsum(x).flatten().tolist() == [111, 110, 100]


def test_suffix_sums_after_a_strong_step_keep_their_digits():
    x = torch.tensor([[-0.125], [-1000.0], [-1e-6], [-2e-6]])
    assert suffix_sum(x)[1].item() == pytest.approx(-3e-6, rel=1e-6)
