"""The token loop is the ground truth, so it is held against arithmetic done on paper and against a closed form."""

import torch

from perilune.kda.reference import recurrent_kda


def test_two_tokens_equal_the_example_worked_by_hand():
    # One head, key_dim 2, value_dim 1, S = [2, 4]. Exact binary fractions only, so that the comparison is exact too.
    # Token 1: retention (1/2, 1/4) -> S = [1, 1]; k = [1, 0], v = 3, beta 1/2: error 3 - 1 = 2 -> S = [2, 1]; q = [1, 1] -> 3.
    # Token 2: retention (1, 1/2) -> S = [2, 1/2]; k = [1/2, 1], v = 1, beta 1: error 1 - 3/2 = -1/2 -> S = [7/4, 0]; q = [1, 2] -> 7/4.
    g = torch.tensor([[[0.5, 0.25]], [[1.0, 0.5]]], dtype=torch.float64).log()
    q = torch.tensor([[[1.0, 1.0]], [[1.0, 2.0]]], dtype=torch.float64)
    k = torch.tensor([[[1.0, 0.0]], [[0.5, 1.0]]], dtype=torch.float64)
    v = torch.tensor([[[3.0]], [[1.0]]], dtype=torch.float64)
    beta = torch.tensor([[0.5], [1.0]], dtype=torch.float64)
    start = torch.tensor([[[[2.0], [4.0]]]], dtype=torch.float64)
    o, final = recurrent_kda(q, k, v, g, beta, (2,), start, 1.0)
    assert torch.allclose(o.flatten(), torch.tensor([3.0, 1.75], dtype=torch.float64), rtol=0, atol=1e-15)
    assert torch.allclose(final.flatten(), torch.tensor([1.75, 0.0], dtype=torch.float64), rtol=0, atol=1e-15)
    half, _ = recurrent_kda(q, k, v, g, beta, (2,), start, 0.5)
    assert torch.equal(half, 0.5 * o)


def test_the_loop_equals_the_product_of_affine_maps():
    # S_t = A_t S_(t-1) + beta_t k_t v_t^T with A_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)), unrolled:
    # S_t = (A_t ... A_1) S_0 + sum_j (A_t ... A_(j+1)) beta_j k_j v_j^T.
    rng = torch.Generator().manual_seed(3)
    tokens, key_dim, value_dim = 7, 4, 3
    q, k, g = (torch.randn(tokens, key_dim, generator=rng, dtype=torch.float64) for _ in range(3))
    v, beta = torch.randn(tokens, value_dim, generator=rng, dtype=torch.float64), torch.rand(tokens, generator=rng, dtype=torch.float64)
    start = torch.randn(key_dim, value_dim, generator=rng, dtype=torch.float64)
    g = -g.abs()
    maps = torch.einsum("tij,tj->tij", torch.eye(key_dim, dtype=torch.float64) - torch.einsum("t,ti,tj->tij", beta, k, k), g.exp())
    writes = torch.einsum("t,tk,tv->tkv", beta, k, v)
    expected = []
    for t in range(tokens):
        transition = torch.eye(key_dim, dtype=torch.float64)
        state = torch.zeros_like(start)
        for j in range(t, -1, -1):
            state = state + transition @ writes[j]
            transition = transition @ maps[j]
        expected.append(0.7 * torch.einsum("k,kv->v", q[t], state + transition @ start))
    o, final = recurrent_kda(q[:, None], k[:, None], v[:, None], g[:, None], beta[:, None], (tokens,), start[None, None], 0.7)
    assert (o[:, 0] - torch.stack(expected)).abs().max() < 1e-12
    assert (final[0, 0] - (state + transition @ start)).abs().max() < 1e-12


def test_sequences_are_independent_and_an_empty_one_passes_its_state_through():
    rng = torch.Generator().manual_seed(5)
    lengths = (2, 0, 3)
    q, k, v, g = (torch.randn(5, 2, 3, generator=rng, dtype=torch.float64) for _ in range(4))
    beta, start = torch.rand(5, 2, generator=rng, dtype=torch.float64), torch.randn(3, 2, 3, 3, generator=rng, dtype=torch.float64)
    o, final = recurrent_kda(q, k, v, -g.abs(), beta, lengths, start, 1.0)
    assert torch.equal(final[1], start[1])
    for rows, n in ((slice(0, 2), 0), (slice(2, 5), 2)):
        alone, end = recurrent_kda(q[rows], k[rows], v[rows], -g[rows].abs(), beta[rows], (lengths[n],), start[n : n + 1], 1.0)
        assert torch.equal(o[rows], alone)
        assert torch.equal(final[n], end[0])


def test_no_tokens_give_no_outputs_and_unchanged_states():
    start = torch.ones(2, 1, 3, 4)
    o, final = recurrent_kda(*(torch.zeros(0, 1, n) for n in (3, 3, 4, 3)), torch.zeros(0, 1), (0, 0), start, 1.0)
    assert o.shape == (0, 1, 4)
    assert torch.equal(final, start)
