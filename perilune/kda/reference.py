"""The token loop: the recurrence of KDA one token at a time. Slow and readable; every other backend is held against it.

For each token (Kimi Linear, arXiv 2510.26692, eq. 1; K3 report section 2.1), with S the state [key_dim, value_dim]:

    S <- Diag(exp(g)) S                     decay first
    S <- S + beta k (v - k^T S)^T           erase and write against the decayed state
    o <- S^T (scale q)                      read after the write
"""

import torch
from torch import Tensor

from perilune.kda.autocast import without_autocast


@without_autocast
def recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: tuple[int, ...], initial_state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs and final states of ragged sequences laid end to end.

    q, k, g: [tokens, heads, key_dim]; v: [tokens, heads, value_dim]; beta: [tokens, heads]; initial_state, key-first:
    [sequences, heads, key_dim, value_dim]. Everything is computed in the dtype of `initial_state`. Returns
    o [tokens, heads, value_dim] and the final states, key-first, both in that dtype. A sequence of length zero passes its state through.
    """
    dtype = initial_state.dtype
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    outputs, states = [], []
    start = 0
    for n, length in enumerate(lengths):
        state = initial_state[n]
        for t in range(start, start + length):
            state = state * g[t].exp().unsqueeze(-1)
            error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
            state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
            outputs.append(torch.einsum("hk,hkv->hv", scale * q[t], state))
        states.append(state)
        start += length
    o = torch.stack(outputs) if outputs else v.new_zeros(v.shape)
    return o, torch.stack(states) if states else initial_state
