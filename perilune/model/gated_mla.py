"""Gated multi-head latent attention without positional encoding (K3 report, section 2.1.2; MLA: DeepSeek-V2, arXiv 2405.04434).

Keys and values are projections of one normalised latent per token plus a key part shared by all heads; the cache holds just
these. Without rotation the key projection can be absorbed into the query exactly, so decoding attends over the latents themselves.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.model.batch import Bucket, SequenceLayout, attention_buckets
from perilune.model.config import LATENT_NORM_EPSILON, ModelConfig
from perilune.model.linear import linear
from perilune.model.norm import RMSNorm
from perilune.model.state import SequenceState


class GatedMLA(nn.Module):
    """MLA over a ragged batch: [tokens, hidden_size] to the same shape. The output gate and the query latent are optional."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.layer, self.heads = layer, heads
        self.nope, self.rope, self.value_dim, self.rank = (
            config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank,
        )  # fmt: skip
        self.scale = (self.nope + self.rope) ** -0.5
        query_width = heads * (self.nope + self.rope)
        self.q_lora_rank = config.q_lora_rank
        if config.q_lora_rank is None:
            self.q_proj = linear(hidden, query_width)
        else:
            self.q_a_proj = linear(hidden, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPSILON)
            self.q_b_proj = linear(config.q_lora_rank, query_width)
        self.kv_a_proj_with_mqa = linear(hidden, self.rank + self.rope)
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_NORM_EPSILON)
        self.kv_b_proj = linear(self.rank, heads * (self.nope + self.value_dim))
        self.output_gate = config.mla_output_gate
        if self.output_gate:
            self.g_proj = linear(hidden, heads * self.value_dim)
        self.o_proj = linear(heads * self.value_dim, hidden)

    def forward(self, x: Tensor, layout: SequenceLayout, state: SequenceState | None) -> Tensor:
        if layout.num_tokens == 0:
            return x
        query = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.view(-1, self.heads, self.nope + self.rope)
        latent, shared_key = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope), -1)
        latents = torch.cat((self.kv_a_layernorm(latent), shared_key), -1)
        if state is None:
            attended = self._attend_packed(query, latents, layout)
        else:
            _append(state.latents[self.layer], latents.detach(), layout)
            attended = self._attend_cached(query, state.latents[self.layer], layout)
        attended = attended.flatten(1)
        if self.output_gate:
            attended = attended * torch.sigmoid(self.g_proj(x))
        y: Tensor = self.o_proj(attended)
        return y

    def _keys_and_values(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [..., heads, nope + rope] and values [..., heads, value_dim] of latents [..., rank + rope]."""
        latent, shared_key = torch.split(latents, [self.rank, self.rope], -1)
        keys, values = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).split((self.nope, self.value_dim), -1)
        shared = shared_key.unsqueeze(-2).expand(*shared_key.shape[:-1], self.heads, self.rope)
        return torch.cat((keys, shared), -1), values

    def _attend_packed(self, query: Tensor, latents: Tensor, layout: SequenceLayout) -> Tensor:
        """Causal attention of whole sequences. Padding comes after a sequence's tokens, so causality hides it."""
        keys, values = self._keys_and_values(latents)
        if len(set(layout.lengths)) == 1:
            shape = (layout.num_sequences, layout.lengths[0], self.heads)
            q, k, v = (x.view(*shape, x.shape[-1]).transpose(1, 2) for x in (query, keys, values))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale).transpose(1, 2).flatten(0, 1)
        outputs, places = [], []
        for bucket in attention_buckets(layout):
            rows, valid = _token_rows(layout, bucket, query.device)
            q, k, v = (x[rows].transpose(1, 2) for x in (query, keys, values))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale).transpose(1, 2)
            outputs.append(out[valid])
            places.append(rows[valid])
        return _restore(outputs, places)

    def _attend_cached(self, query: Tensor, pool: Tensor, layout: SequenceLayout) -> Tensor:
        """Attention of new tokens to all tokens of their sequences, whose latents are in `pool`."""
        outputs, places = [], []
        for bucket in attention_buckets(layout):
            rows, valid = _token_rows(layout, bucket, query.device)
            slots = torch.tensor([layout.slots[i] for i in bucket.members], dtype=torch.int64, device=query.device)
            latents = pool[:, : bucket.keys].index_select(0, slots)
            context = torch.tensor([layout.contexts[i] for i in bucket.members], device=query.device)
            position = context.unsqueeze(1) + torch.arange(bucket.queries, device=query.device)
            visible = (torch.arange(bucket.keys, device=query.device) <= position.unsqueeze(-1)).unsqueeze(1)
            attend = self._absorbed if bucket.queries == 1 else self._expanded
            out = attend(query[rows], latents.to(query.dtype), visible)
            outputs.append(out[valid])
            places.append(rows[valid])
        return _restore(outputs, places)

    def _expanded(self, query: Tensor, latents: Tensor, visible: Tensor) -> Tensor:
        """query [sequences, queries, heads, nope + rope], latents [sequences, keys, rank + rope], visible [sequences, 1, queries, keys]."""
        keys, values = self._keys_and_values(latents)
        q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale).transpose(1, 2)

    def _absorbed(self, query: Tensor, latents: Tensor, visible: Tensor) -> Tensor:
        """As `_expanded` for one query a sequence, without forming keys and values: the heads share the latents as keys."""
        key_weight, value_weight = torch.split(self.kv_b_proj.weight.view(self.heads, -1, self.rank), [self.nope, self.value_dim], 1)
        nope, rope = torch.split(query[:, 0], [self.nope, self.rope], -1)
        absorbed = torch.cat((torch.einsum("shn,hnr->shr", nope, key_weight), rope), -1).unsqueeze(1)
        keys = latents.unsqueeze(1)
        mixed = F.scaled_dot_product_attention(absorbed, keys, keys[..., : self.rank], attn_mask=visible, scale=self.scale)
        return torch.einsum("shr,hvr->shv", mixed[:, 0], value_weight).unsqueeze(1)


def _append(pool: Tensor, latents: Tensor, layout: SequenceLayout) -> None:
    """Write each sequence's new latents behind those it has."""
    lengths = torch.tensor(layout.lengths)
    slots = torch.repeat_interleave(torch.tensor(layout.slots), lengths)
    start = torch.tensor(layout.contexts) - (lengths.cumsum(0) - lengths)
    position = torch.arange(layout.num_tokens) + torch.repeat_interleave(start, lengths)
    pool[slots.to(pool.device), position.to(pool.device)] = latents.to(pool.dtype)


def _token_rows(layout: SequenceLayout, bucket: Bucket, device: torch.device) -> tuple[Tensor, Tensor]:
    """Flat token index [sequences, queries] of a bucket's queries, the last token repeated as padding, and which are real."""
    lengths = torch.tensor(layout.lengths)
    members = torch.tensor(bucket.members)
    size = lengths[members].unsqueeze(1)
    start = (lengths.cumsum(0) - lengths)[members].unsqueeze(1)
    offset = torch.arange(bucket.queries)
    return (start + torch.minimum(offset, size - 1)).to(device), (offset < size).to(device)


def _restore(outputs: list[Tensor], places: list[Tensor]) -> Tensor:
    """Rows of the buckets back in the order of the flat batch."""
    if len(outputs) == 1:
        return outputs[0].index_select(0, torch.argsort(places[0]))
    return torch.cat(outputs).index_select(0, torch.argsort(torch.cat(places)))
