"""The KDA layer: projections, short convolutions, gates, the recurrence, gated output norm.

K3 report (arXiv 2607.24653), section 2.1; Kimi Linear (arXiv 2510.26692), section 4.
"""

import math

import torch
from torch import Tensor, nn

from perilune.kda.api import decode_kda_
from perilune.kda.gates import log_decay
from perilune.kda.normalize import l2_normalize
from perilune.kda.portable import chunk_kda
from perilune.kda.short_conv import short_convolution
from perilune.model.batch import SequenceLayout
from perilune.model.config import ModelConfig
from perilune.model.linear import linear
from perilune.model.norm import RMSNorm
from perilune.model.state import SequenceState


def chunk_size(head_dim: int) -> int:
    """Tokens per chunk at which the portable backend was fastest, forward and backward, for heads of 32 (16) and of 128 (32)."""
    return 16 if head_dim < 64 else 32


class KDAAttention(nn.Module):
    """Kimi Delta Attention over a ragged batch: [tokens, hidden_size] to the same shape."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, width, dim = config.hidden_size, config.kda_width, config.kda_head_dim
        self.layer, self.heads, self.head_dim = layer, config.kda_num_heads, dim
        self.lower_bound = config.gate_lower_bound
        self.chunk = chunk_size(dim)
        self.q_proj, self.k_proj, self.v_proj = (linear(hidden, width) for _ in range(3))
        kernel = config.short_conv_kernel_size
        self.q_conv, self.k_conv, self.v_conv = (nn.Parameter(torch.empty(width, kernel)) for _ in range(3))
        self.f_a_proj, self.f_b_proj = linear(hidden, dim), linear(dim, width)
        self.b_proj = linear(hidden, self.heads)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(width))
        if config.full_rank_gate:
            self.g_proj = linear(hidden, width)
        else:
            self.g_a_proj, self.g_b_proj = linear(hidden, dim), linear(dim, width)
        self.full_rank_gate = config.full_rank_gate
        self.o_norm = RMSNorm(dim, config.rms_norm_eps)
        self.o_proj = linear(width, hidden)

    def reset_parameters(self) -> None:
        """Convolutions as torch's, the gate so that retention starts between 0.62 and 0.995 under the K3 bound."""
        for conv in (self.q_conv, self.k_conv, self.v_conv):
            nn.init.uniform_(conv, -(conv.shape[1] ** -0.5), conv.shape[1] ** -0.5)
        if self.lower_bound is not None:
            nn.init.zeros_(self.A_log)
        else:
            with torch.no_grad():
                self.A_log.uniform_(1, 16).log_()
        with torch.no_grad():
            step = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp().clamp_(min=1e-4)
            self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: Tensor, layout: SequenceLayout, state: SequenceState | None) -> Tensor:
        split = (-1, self.heads, self.head_dim)
        projected = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)
        kernels = torch.cat((self.q_conv, self.k_conv, self.v_conv))
        slots = torch.tensor(layout.slots, dtype=torch.int64, device=x.device)
        history = None if state is None else state.conv[self.layer].index_select(0, slots)
        mixed, history = short_convolution(projected, kernels, layout.lengths, history)
        q, k, v = (part.reshape(split) for part in mixed.chunk(3, -1))
        q, k = l2_normalize(q), l2_normalize(k)
        g = log_decay(self.f_b_proj(self.f_a_proj(x)).view(split), self.A_log, self.dt_bias, self.lower_bound)
        beta = torch.sigmoid(self.b_proj(x).to(g.dtype))
        scale = self.head_dim**-0.5
        if state is None:
            start = g.new_zeros(layout.num_sequences, self.heads, self.head_dim, self.head_dim)
            o, _ = chunk_kda(q, k, v, g, beta, layout.lengths, start, scale, chunk=self.chunk, lower_bound=self.lower_bound)
        else:
            pool = state.recurrent[self.layer]
            if layout.is_decode:
                o = decode_kda_(q, k, v, g, beta, pool, slots, scale)
            else:
                start = pool.index_select(0, slots)
                o, final = chunk_kda(q, k, v, g, beta, layout.lengths, start, scale, chunk=self.chunk, lower_bound=self.lower_bound)
                pool.index_copy_(0, slots, final.detach())
            inputs = state.conv[self.layer]
            inputs.index_copy_(0, slots, history.to(inputs.dtype))
        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        o = self.o_norm(o) * torch.sigmoid(gate.view(split).to(o.dtype))
        y: Tensor = self.o_proj(o.flatten(1).to(x.dtype))
        return y
