"""Decayed products inside a chunk: K K^T and Q K^T with the decay between the two tokens, for any gate, without overflow.

For tokens i >= j of a chunk and D(i, j) = sum of g over the steps j+1 .. i (never positive), this computes

    kk[i, j] = sum_d k[i, d] k[j, d] exp(D(i, j)_d)   for i > j
    qk[i, j] = sum_d q[i, d] k[j, d] exp(D(i, j)_d)   for i >= j

As a matrix product the decay must be split into a factor of i and a factor of j, and the second may overflow. The cure is
to split where both factors are at most one: the chunk is halved, every pair of (late half, early half) is split at the
border between them, and the halves are treated the same way, down to a leaf. With the bounded gate a leaf is a block of
LEAF tokens computed as one dense product around a fixed centre (its span, 15 steps of at most 5 nats, fits fp32 with room
for gradients); without a bound the leaf is a single token, so the result is exact however strong one step's decay is.

All decay sums are local to their half: a step of -1000 makes a factor zero and never spoils the digits of its neighbours.
Nothing here depends on tokens after i, so a prefix's outputs do not change when more tokens follow.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LEAF = 16
# The widest span of log-decay that a dense leaf may have, in nats: split in two symmetric factors of at most exp(40).
LARGEST_LEAF_SPAN = 80.0


def leaf_size(lower_bound: float | None) -> int:
    """Tokens per dense leaf: LEAF where the gate's bound allows it, else 1."""
    if lower_bound is not None and -lower_bound * (LEAF - 1) <= LARGEST_LEAF_SPAN:
        return LEAF
    return 1


def suffix_sum(x: Tensor) -> Tensor:
    """Sum of the rows after each row, along the last axis but one; the last row's is zero. Never subtracts, so it keeps all digits."""
    later = x[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
    return F.pad(later, (0, 0, 0, 1))


def reverse_cumsum(x: Tensor) -> Tensor:
    """Sum of each row and the rows after it, along the last axis but one: the transpose of cumsum."""
    return x.flip(-2).cumsum(-2).flip(-2)


def prefix_sum(x: Tensor) -> Tensor:
    """Sum of the rows before each row, along the last axis but one: the transpose of `suffix_sum`."""
    return F.pad(x[..., :-1, :].cumsum(-2), (0, 0, 1, 0))


@dataclass(frozen=True)
class _Split:
    """Factors of one level of the recursion, [batch, pairs, half, key_dim]: `late` halves from their start, `early` halves to their end."""

    half: int
    late: Tensor
    early: Tensor


@dataclass(frozen=True)
class DecayFactors:
    """The exponentials that forward and backward share. `rise` and `fall`, [batch, blocks, LEAF, key_dim], exist for dense leaves only."""

    splits: tuple[_Split, ...]
    rise: Tensor | None
    fall: Tensor | None


def decay_factors(g: Tensor, lower_bound: float | None) -> DecayFactors:
    """Factors for log-decays g [batch, chunk, key_dim] (<= 0), chunk a power of two of at least LEAF.

    `lower_bound` is the promise that no entry of g is below it; None promises nothing.
    """
    batch, chunk, key_dim = g.shape
    leaf = leaf_size(lower_bound)
    splits = []
    half = chunk // 2
    while half >= leaf:
        early, late = g.view(batch, chunk // (2 * half), 2, half, key_dim).unbind(2)
        splits.append(_Split(half, late.cumsum(-2).exp(), suffix_sum(early).exp()))
        half //= 2
    if leaf == 1:
        return DecayFactors(tuple(splits), None, None)
    assert lower_bound is not None
    blocks = g.view(batch, chunk // leaf, leaf, key_dim)
    # The centre is a constant below the first row, not the block's own middle: later tokens must not move it.
    centred = blocks.cumsum(-2) - blocks[:, :, :1] - 0.5 * (leaf - 1) * lower_bound
    return DecayFactors(tuple(splits), centred.exp(), (-centred).exp())


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """View of the diagonal blocks of [batch, chunk, chunk] as [batch, blocks, size, size]."""
    batch, chunk, _ = matrix.shape
    blocks = matrix.view(batch, chunk // size, size, chunk // size, size)
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def decayed_products(q: Tensor, k: Tensor, factors: DecayFactors) -> tuple[Tensor, Tensor]:
    """kk (strictly lower) and qk (lower with diagonal), both [batch, chunk, chunk], from q and k [batch, chunk, key_dim]."""
    batch, chunk, key_dim = k.shape
    kk, qk = k.new_zeros(2, batch, chunk, chunk).unbind(0)
    for split in factors.splits:
        size = 2 * split.half
        k_early, k_late = k.view(batch, -1, 2, split.half, key_dim).unbind(2)
        q_late = q.view(batch, -1, 2, split.half, key_dim)[:, :, 1]
        columns = (k_early * split.early).mT
        _diagonal_blocks(kk, size)[:, :, split.half :, : split.half].copy_((k_late * split.late) @ columns)
        _diagonal_blocks(qk, size)[:, :, split.half :, : split.half].copy_((q_late * split.late) @ columns)
    if factors.rise is None or factors.fall is None:
        qk.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
        return kk, qk
    blocks = factors.rise.shape
    columns = (k.view(blocks) * factors.fall).mT
    # Masked after the product: above the diagonal the terms are large but finite.
    _diagonal_blocks(kk, LEAF).copy_(((k.view(blocks) * factors.rise) @ columns).tril_(-1))
    _diagonal_blocks(qk, LEAF).copy_(((q.view(blocks) * factors.rise) @ columns).tril_())
    return kk, qk


def decayed_products_backward(
    q: Tensor, k: Tensor, factors: DecayFactors, grad_kk: Tensor, grad_qk: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and g, [batch, chunk, key_dim], for gradients of kk and qk that are zero outside their triangles."""
    batch, chunk, key_dim = k.shape
    if factors.rise is None or factors.fall is None:
        diagonal = grad_qk.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        grad_q, grad_k, grad_g = diagonal * k, diagonal * q, torch.zeros_like(k)
    else:
        shape = factors.rise.shape
        k_rise, q_rise, k_fall = (x.view(shape) * y for x, y in ((k, factors.rise), (q, factors.rise), (k, factors.fall)))
        kk_blocks, qk_blocks = _diagonal_blocks(grad_kk, LEAF), _diagonal_blocks(grad_qk, LEAF)
        grad_k_rise, grad_q_rise = kk_blocks @ k_fall, qk_blocks @ k_fall
        grad_k_fall = kk_blocks.mT @ k_rise + qk_blocks.mT @ q_rise
        grad_q = (grad_q_rise * factors.rise).view(batch, chunk, key_dim)
        grad_k = (grad_k_rise * factors.rise + grad_k_fall * factors.fall).view(batch, chunk, key_dim)
        grad_sum = k_rise * grad_k_rise + q_rise * grad_q_rise - k_fall * grad_k_fall
        grad_g = reverse_cumsum(grad_sum)
        # No decay between two tokens of a block holds the first token's own step: what is there is rounding.
        grad_g[:, :, 0] = 0
        grad_g = grad_g.view(batch, chunk, key_dim)
    for split in factors.splits:
        size, halves = 2 * split.half, (batch, -1, 2, split.half, key_dim)
        k_early, k_late = k.view(halves).unbind(2)
        k_late, q_late, k_early = k_late * split.late, q.view(halves)[:, :, 1] * split.late, k_early * split.early
        kk_blocks = _diagonal_blocks(grad_kk, size)[:, :, split.half :, : split.half]
        qk_blocks = _diagonal_blocks(grad_qk, size)[:, :, split.half :, : split.half]
        grad_k_late, grad_q_late = kk_blocks @ k_early, qk_blocks @ k_early
        grad_k_early = kk_blocks.mT @ k_late + qk_blocks.mT @ q_late
        grad_q.view(halves)[:, :, 1] += grad_q_late * split.late
        grad_k.view(halves)[:, :, 1] += grad_k_late * split.late
        grad_k.view(halves)[:, :, 0] += grad_k_early * split.early
        grad_g.view(halves)[:, :, 1] += reverse_cumsum(k_late * grad_k_late + q_late * grad_q_late)
        grad_g.view(halves)[:, :, 0] += prefix_sum(k_early * grad_k_early)
    return grad_q, grad_k, grad_g
