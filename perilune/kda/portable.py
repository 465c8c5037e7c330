"""KDA in chunks, in plain torch, on any device: forward and backward, one loop over the chunk index.

Everything that does not need the state is computed for all chunks, heads and sequences at once; the loop over the chunk
index carries only the state (three batched products a step). Notation and derivation: Kimi Linear (arXiv 2510.26692),
section 3. With G the running sum of g inside a chunk, kk and qk the decayed products (`intra_chunk`), S0 and S1 the states
at a chunk's ends, all per head:

    Qh = scale Q exp(G)   Kh = K exp(G)   Kt = K exp(G_end - G)   L = tril(beta kk, -1)   M = scale qk
    [W, U] = (I + L)^-1 [beta Kh, beta V]       E = U - W S0       O = Qh S0 + M E       S1 = Diag(exp(G_end)) S0 + Kt^T E

Backward, with P = (I + L)^-T dE, uses dL = -tril(P E^T, -1) and d(beta Kh) = -P S0^T, so no inverse is ever formed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.kda.autocast import without_autocast
from perilune.kda.chunk_layout import ChunkLayout, chunk_layout
from perilune.kda.intra_chunk import (
    DecayFactors,
    decay_factors,
    decayed_products,
    decayed_products_backward,
    prefix_sum,
    reverse_cumsum,
    suffix_sum,
)


@dataclass(frozen=True)
class _Chunks:
    """All state-free quantities of a call; the leading axis is chunk * head, chunk-major as in ChunkLayout."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    factors: DecayFactors
    kk: Tensor
    scores: Tensor
    unit_lower: Tensor
    q_in: Tensor
    k_in: Tensor
    k_out: Tensor
    from_start: Tensor
    to_end: Tensor
    whole: Tensor
    w: Tensor
    u: Tensor


def _head_rows(layout: ChunkLayout, heads: int) -> Tensor:
    """For each row of [chunks * heads, chunk], the row of [tokens * heads] that it shows; flat."""
    head = torch.arange(heads, device=layout.rows.device).view(1, heads, 1)
    return (layout.rows.view(-1, 1, layout.chunk) * heads + head).flatten()


def _gather(x: Tensor, head_rows: Tensor, chunk: int) -> Tensor:
    """[tokens, heads, ...] to [chunks * heads, chunk, ...]."""
    return x.reshape(x.shape[0] * x.shape[1], -1).index_select(0, head_rows).view(-1, chunk, *x.shape[2:])


def _scatter(x: Tensor, layout: ChunkLayout, heads: int) -> Tensor:
    """[chunks * heads, chunk, ...] back to [tokens, heads, ...]; rows without a token are dropped."""
    by_row = x.view(-1, heads, *x.shape[1:]).transpose(1, 2).reshape(-1, heads, *x.shape[2:])
    return by_row.index_select(0, layout.place)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: ChunkLayout, scale: float, lower_bound: float | None
) -> _Chunks:
    heads, key_dim = k.shape[1:]
    head_rows = _head_rows(layout, heads)
    q, k, v, g, beta = (_gather(x, head_rows, layout.chunk) for x in (q, k, v, g, beta))
    if layout.valid is not None:
        # A row without a token must neither decay nor write; its q, k and v are finite copies and then do not matter.
        valid = layout.valid.repeat_interleave(heads, 0)
        g, beta = g.masked_fill(~valid.unsqueeze(-1), 0.0), beta.masked_fill(~valid, 0.0)
    factors = decay_factors(g, lower_bound)
    kk, qk = decayed_products(q, k, factors)
    total = g.cumsum(1)
    from_start, to_end, whole = total.exp(), suffix_sum(g).exp(), total[:, -1].exp()
    k_in = k * from_start
    beta = beta.unsqueeze(-1)
    unit_lower = beta * kk
    solved = torch.linalg.solve_triangular(unit_lower, torch.cat((beta * k_in, beta * v), -1), upper=False, unitriangular=True)
    return _Chunks(
        q, k, v, beta, factors, kk, qk.mul_(scale), unit_lower, q * from_start * scale, k_in, k * to_end,
        from_start, to_end, whole, *(x.contiguous() for x in solved.split((key_dim, v.shape[-1]), -1)),
    )  # fmt: skip


def _forward_scan(chunks: _Chunks, layout: ChunkLayout, state: Tensor) -> tuple[Tensor, Tensor]:
    """Advance `state` [sequences * heads, key_dim, value_dim] in place; returns the errors E and the states at each chunk's start."""
    heads = state.shape[0] // layout.order.numel()
    errors = chunks.u
    starts = state.new_empty(chunks.u.shape[0], *state.shape[1:])
    for first, sequences in layout.steps:
        part = slice(first * heads, (first + sequences) * heads)
        current = state[: sequences * heads]
        starts[part] = current
        errors[part].baddbmm_(chunks.w[part], current, alpha=-1)
        current.mul_(chunks.whole[part].unsqueeze(-1)).baddbmm_(chunks.k_out[part].mT, errors[part])
    return errors, starts


def _backward_scan(chunks: _Chunks, layout: ChunkLayout, grad_errors: Tensor, from_outputs: Tensor, grad_state: Tensor) -> Tensor:
    """Carry `grad_state` back in place and complete `grad_errors` in place; returns the gradients of each chunk's end state."""
    heads = grad_state.shape[0] // layout.order.numel()
    ends = grad_state.new_empty(grad_errors.shape[0], *grad_state.shape[1:])
    for first, sequences in reversed(layout.steps):
        part = slice(first * heads, (first + sequences) * heads)
        current = grad_state[: sequences * heads]
        ends[part] = current
        grad_errors[part].baddbmm_(chunks.k_out[part], current)
        current.mul_(chunks.whole[part].unsqueeze(-1)).add_(from_outputs[part])
        current.baddbmm_(chunks.w[part].mT, grad_errors[part], alpha=-1)
    return ends


class _ChunkKDA(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
        layout: ChunkLayout, scale: float, lower_bound: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        heads = k.shape[1]
        chunks = _prepare(q, k, v, g, beta, layout, scale, lower_bound)
        state = initial_state.index_select(0, layout.order).flatten(0, 1)
        errors, starts = _forward_scan(chunks, layout, state)
        out = torch.baddbmm(chunks.q_in @ starts, chunks.scores, errors)
        final = torch.empty_like(initial_state)
        final[layout.order] = state.view_as(initial_state)
        ctx.chunks, ctx.layout, ctx.scale, ctx.heads = chunks, layout, scale, heads
        ctx.save_for_backward(errors, starts)
        return _scatter(out, layout, heads), final

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        layout, scale, heads, c = ctx.layout, ctx.scale, ctx.heads, ctx.chunks
        errors, starts = ctx.saved_tensors
        grad_o = _gather(grad_out, _head_rows(layout, heads), layout.chunk)
        if layout.valid is not None:
            grad_o = grad_o * layout.valid.repeat_interleave(heads, 0).unsqueeze(-1)
        grad_scores = (grad_o @ errors.mT).tril_()
        grad_state = grad_final.index_select(0, layout.order).flatten(0, 1)
        grad_errors = c.scores.mT @ grad_o
        ends = _backward_scan(c, layout, grad_errors, c.q_in.mT @ grad_o, grad_state)

        p = torch.linalg.solve_triangular(c.unit_lower.mT, grad_errors, upper=True, unitriangular=True)
        grad_q_in, r = (torch.cat((grad_o, p), 1) @ starts.mT).split(layout.chunk, 1)
        r = -r
        grad_lower = (p @ errors.mT).tril_(-1).neg_()
        grad_beta = (c.v * p).sum(-1) + (c.k_in * r).sum(-1) + (grad_lower * c.kk).sum(-1)
        grad_k_in, grad_k_out = c.beta * r, errors @ ends.mT

        grad_q, grad_k, grad_g = decayed_products_backward(c.q, c.k, c.factors, c.beta * grad_lower, grad_scores.mul_(scale))
        grad_q += grad_q_in * c.from_start * scale
        grad_k += grad_k_in * c.from_start + grad_k_out * c.to_end
        grad_total = c.q_in * grad_q_in + c.k_in * grad_k_in
        grad_total[:, -1] += c.whole * (starts * ends).sum(-1)
        grad_g += reverse_cumsum(grad_total) + prefix_sum(c.k_out * grad_k_out)

        grad_initial = torch.empty_like(grad_final)
        grad_initial[layout.order] = grad_state.view_as(grad_final)
        grads = (_scatter(x, layout, heads) for x in (grad_q, grad_k, c.beta * p, grad_g, grad_beta))
        return (*grads, grad_initial, None, None, None)


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: tuple[int, ...], initial_state: Tensor, scale: float,
    *, chunk: int = 32, lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and final states of ragged sequences laid end to end; differentiable once, to every tensor argument.

    q, k, g: [tokens, heads, key_dim], g the log-decay (<= 0); v: [tokens, heads, value_dim]; beta: [tokens, heads];
    initial_state, key-first: [sequences, heads, key_dim, value_dim]. Everything is computed in the dtype of `initial_state`
    (fp32 or fp64). `chunk` is 16, 32 or 64. `lower_bound` promises that no g is below it and buys the dense diagonal
    blocks; without it any g is exact. Returns o [tokens, heads, value_dim] and the final states, in that dtype.
    """
    if chunk not in (16, 32, 64):
        raise ValueError(f"chunk must be 16, 32 or 64, got {chunk}")
    dtype = initial_state.dtype
    if q.shape[0] == 0:
        return v.to(dtype), initial_state
    layout = chunk_layout(lengths, chunk, q.device)
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    o, final = _ChunkKDA.apply(q, k, v, g, beta, initial_state, layout, scale, lower_bound)  # type: ignore[no-untyped-call]
    return o, final
