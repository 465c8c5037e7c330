"""Decoder: the K3 and Kimi Linear networks in one definition, for training, prefill and decode.

Layers are KDA or MLA attention followed by a dense MLP or experts. With Block Attention Residuals (arXiv 2603.15031) every
sublayer reads a mixture of the bank of block sums and the running sum; without, the running sum alone: a plain residual stream.
"""

import torch
from torch import Tensor, nn

from perilune.model.attention_residuals import AttentionResidual
from perilune.model.batch import SequenceLayout
from perilune.model.config import ModelConfig
from perilune.model.gated_mla import GatedMLA
from perilune.model.kda_attention import KDAAttention
from perilune.model.latent_moe import GatedMLP, LatentMoE, RoutingObserver
from perilune.model.linear import linear
from perilune.model.norm import RMSNorm
from perilune.model.state import SequenceState


class DecoderLayer(nn.Module):
    """One attention and one feed-forward sublayer, with their two reads of the residual bank."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = (KDAAttention if config.attention[layer] == "kda" else GatedMLA)(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        moe = layer - config.first_k_dense
        self.mlp = LatentMoE(config, moe) if moe >= 0 else GatedMLP(config, config.intermediate_size)
        self.block_size = config.attn_res_block_size
        self.starts_block = config.attn_res_block_size is not None and layer % config.attn_res_block_size == 0
        if self.block_size is not None:
            self.self_attention_res = AttentionResidual(config.hidden_size, config.rms_norm_eps)
            self.mlp_res = AttentionResidual(config.hidden_size, config.rms_norm_eps)
            if layer == 0:
                # The bank is empty here: the released model stores this read but never uses it.
                self.self_attention_res.requires_grad_(False)

    def forward(
        self, running: Tensor, bank: list[Tensor], layout: SequenceLayout, state: SequenceState | None,
        observer: RoutingObserver | None, replay: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The new running sum [tokens, hidden_size]. A layer that starts a block appends the finished sum to `bank` first."""
        residual = self.block_size is not None
        x = self.self_attention_res(bank, running) if residual else running
        if self.starts_block:
            bank.append(running)
        y = self.self_attn(self.input_layernorm(x), layout, state)
        running = y if self.starts_block else running + y
        x = self.mlp_res(bank, running) if residual else running
        x = self.post_attention_layernorm(x)
        out: Tensor = running + (self.mlp(x, observer, replay) if isinstance(self.mlp, LatentMoE) else self.mlp(x))
        return out


class Decoder(nn.Module):
    """Token ids and a layout, and for generation a state, to logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        if config.attn_res_block_size is not None:
            self.output_attn_res = AttentionResidual(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def reset_parameters(self, seed: int) -> None:
        """Initialise all weights: matrices N(0, initializer_range), norms one, pseudo-queries zero, gates as the layers say."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, std=self.config.initializer_range)
                elif isinstance(module, LatentMoE):
                    nn.init.normal_(module.experts_gate_up, std=self.config.initializer_range)
                    nn.init.normal_(module.experts_down, std=self.config.initializer_range)
                    nn.init.zeros_(module.selection_bias)
                elif isinstance(module, KDAAttention):
                    module.reset_parameters()
                elif isinstance(module, RMSNorm):
                    nn.init.ones_(module.weight)
                elif isinstance(module, AttentionResidual):
                    nn.init.zeros_(module.proj)

    def forward(
        self, ids: Tensor, layout: SequenceLayout, state: SequenceState | None = None, *,
        observer: RoutingObserver | None = None, replay: Tensor | None = None, rows: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits [tokens, vocab_size], or of the tokens named by `rows` only, in fp32 (fp64 for fp64 weights).

        ids: [tokens] int64, the layout's sequences end to end. `state` is read at `layout.slots` and updated in place; without
        it every sequence starts afresh. `observer` is told each MoE layer's routing; `replay` [moe_layers, tokens, top_k]
        forces the chosen experts. Raises ValueError when ids, layout, state and replay do not fit together.
        """
        _check(ids, layout, state)
        if replay is not None:
            _check_replay(replay, self.config, layout.num_tokens)
        running = self.embed_tokens(ids)
        bank: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            moe = index - self.config.first_k_dense
            running = layer(running, bank, layout, state, observer, replay[moe] if replay is not None and moe >= 0 else None)
        if rows is not None:
            bank, running = [x.index_select(0, rows) for x in bank], running.index_select(0, rows)
        x = self.output_attn_res(bank, running) if self.config.attn_res_block_size is not None else running
        logits: Tensor = self.lm_head(self.norm(x))
        return logits if logits.dtype == torch.float64 else logits.float()


def _check(ids: Tensor, layout: SequenceLayout, state: SequenceState | None) -> None:
    if ids.ndim != 1 or ids.shape[0] != layout.num_tokens:
        raise ValueError(f"ids must be one flat row of the layout's {layout.num_tokens} tokens, got shape {tuple(ids.shape)}")
    if state is None:
        if any(layout.contexts) or layout.slots:
            raise ValueError("the layout speaks of earlier tokens or slots: pass the state that holds them")
        return
    if len(layout.slots) != layout.num_sequences:
        raise ValueError("a forward with a state needs a slot for each sequence")
    if layout.slots and not 0 <= min(layout.slots) <= max(layout.slots) < state.num_slots:
        raise ValueError(f"slots {layout.slots} lie outside the state's {state.num_slots}")
    longest = max((c + n for c, n in zip(layout.contexts, layout.lengths, strict=True)), default=0)
    if longest > state.max_length:
        raise ValueError(f"a sequence would grow to {longest} tokens; the state holds {state.max_length}")


def _check_replay(replay: Tensor, config: ModelConfig, tokens: int) -> None:
    wanted = (len(config.moe_layers), tokens, config.num_experts_per_token)
    if replay.shape != wanted:
        raise ValueError(f"replayed expert ids must be [moe_layers, tokens, top_k] {wanted}, got {tuple(replay.shape)}")
