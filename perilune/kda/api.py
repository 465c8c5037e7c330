"""The public operator: KDA over batches or ragged sequences, with the parameter names and layouts of flash-linear-attention 0.6.

Layouts: q, k and g [batch, tokens, heads, key_dim], v [batch, tokens, heads, value_dim], beta [batch, tokens, heads]; states are
key-first, [sequences, heads, key_dim, value_dim], fp32. With `cu_seqlens` the batch is 1 and the token axis holds the sequences
end to end. Backends: `portable` (chunkwise, differentiable) and `reference` (the token loop).
"""

from itertools import pairwise

import torch
from torch import Tensor

from perilune.kda import portable, reference
from perilune.kda.autocast import without_autocast
from perilune.kda.gates import log_decay
from perilune.kda.normalize import l2_normalize


def _lengths(batch: int, tokens: int, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    if cu_seqlens is None:
        return (tokens,) * batch
    if batch != 1:
        raise ValueError(f"with cu_seqlens the sequences lie end to end in one row: batch must be 1, got {batch}")
    bounds = [int(x) for x in cu_seqlens.tolist()]
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens ({tokens}), got {bounds[:8]}{'…' if len(bounds) > 8 else ''}"
        )
    return tuple(b - a for a, b in pairwise(bounds))


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q and v must be [batch, tokens, heads, dim], got {tuple(q.shape)} and {tuple(v.shape)}")
    if k.shape != q.shape or g.shape != q.shape:
        raise ValueError(f"q, k and g must have one shape, got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(g.shape)}")
    if v.shape[:3] != q.shape[:3] or beta.shape != q.shape[:3]:
        raise ValueError(
            f"v and beta must share q's [batch, tokens, heads] {tuple(q.shape[:3])}, got {tuple(v.shape)} and {tuple(beta.shape)}"
        )


def _run(
    backend: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float | None, initial_state: Tensor | None,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool, use_beta_sigmoid_in_kernel: bool, safe_gate: bool,
    A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    _check(q, k, v, g, beta)
    batch, tokens, heads, key_dim = q.shape
    lengths = _lengths(batch, tokens, cu_seqlens)
    state_shape = (len(lengths), heads, key_dim, v.shape[-1])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if initial_state is None:
        state = torch.zeros(state_shape, dtype=dtype, device=q.device)
    elif initial_state.shape != state_shape:
        raise ValueError(
            f"initial_state is key-first [sequences, heads, key_dim, value_dim] {state_shape}, got {tuple(initial_state.shape)}"
        )
    else:
        state = initial_state.to(dtype)
    if use_gate_in_kernel:
        g = log_decay(g, A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta.to(dtype))
    if use_qk_l2norm_in_kernel:
        q, k = l2_normalize(q), l2_normalize(k)
    q, k, flat_v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    scale = key_dim**-0.5 if scale is None else scale
    if backend == "portable":
        # A gate made here is known to respect its bound; for one made elsewhere safe_gate is the caller's promise of [-5, 0].
        bound = lower_bound if use_gate_in_kernel else (-5.0 if safe_gate else None)
        o, final = portable.chunk_kda(q, k, flat_v, g, beta, lengths, state, scale, chunk=chunk_size, lower_bound=bound)
    else:
        o, final = reference.recurrent_kda(q, k, flat_v, g, beta, lengths, state, scale)
    return o.to(q.dtype).view_as(v), final if output_final_state else None


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, safe_gate: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    lower_bound: float | None = None, cu_seqlens: Tensor | None = None, chunk_size: int = 32,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """KDA in chunks, differentiable; the form for training and prefill.

    `scale` is key_dim^-0.5 by default. With `use_gate_in_kernel` g holds raw gate projections (`log_decay` says which gate), else
    log-decays; with `safe_gate` the caller promises log-decays in [-5, 0]. `use_beta_sigmoid_in_kernel` and
    `use_qk_l2norm_in_kernel` apply the sigmoid to beta and the L2 norm to q and k.
    Returns o [batch, tokens, heads, value_dim] in q's dtype and the final state (fp32; fp64 for fp64 inputs) or None.
    Raises ValueError for shapes that do not fit, a batch above 1 with cu_seqlens, or a chunk_size other than 16, 32 or 64.
    """
    return _run(
        "portable", q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, safe_gate=safe_gate, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, cu_seqlens=cu_seqlens, chunk_size=chunk_size,
    )  # fmt: skip


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    lower_bound: float | None = None, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """KDA token by token: the same result as `chunk_kda` with the same arguments, by the recurrence itself."""
    return _run(
        "reference", q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, safe_gate=False, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, cu_seqlens=cu_seqlens, chunk_size=0,
    )  # fmt: skip


@torch.no_grad()
@without_autocast
def decode_kda_(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor, scale: float) -> Tensor:
    """One token for each sequence, updating a pool of states in place (no gradients).

    q, k, g: [sequences, heads, key_dim], g the log-decay; v: [sequences, heads, value_dim]; beta: [sequences, heads];
    states, key-first: [slots, heads, key_dim, value_dim]; slots [sequences] int64, without repetition. Rows of `states` that
    `slots` does not name keep their bits. Returns o [sequences, heads, value_dim] in the dtype of `states`.
    """
    dtype = states.dtype
    state = states.index_select(0, slots).mul_(g.to(dtype).exp().unsqueeze(-1))
    key = k.to(dtype).unsqueeze(-1)
    error = v.to(dtype).unsqueeze(-2) - key.mT @ state
    state.addcmul_(key * beta.to(dtype)[..., None, None], error)
    states.index_copy_(0, slots, state)
    return ((scale * q.to(dtype)).unsqueeze(-2) @ state).squeeze(-2)
