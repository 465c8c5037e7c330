"""What a model costs: parameters in all and per token, memory per token and per request, against the same model in all-MLA.

A KDA layer holds a state of fixed size per request, an MLA layer one latent row per token. The hybrid therefore pays off above
the crossover, the context at which the states cost as much as the latents they replace.
"""

from dataclasses import dataclass

import torch

from perilune.model.config import ModelConfig
from perilune.model.decoder import Decoder

_BF16 = 2
_FP32 = 4


@dataclass(frozen=True)
class Footprint:
    """Counts and bytes. States are the KDA recurrent matrices (bf16 or fp32) and the short convolutions' inputs (always bf16);
    latents are bf16. `active` counts what one token's forward reads: all but the input embedding and the experts not chosen."""

    total_parameters: int
    active_parameters: int
    state_bytes: int
    state_bytes_fp32: int
    bytes_per_token: int
    all_mla_bytes_per_token: int

    @property
    def saved_bytes_per_token(self) -> int:
        """Latents that the KDA layers would hold per token if they were MLA."""
        return self.all_mla_bytes_per_token - self.bytes_per_token

    @property
    def crossover_tokens(self) -> int:
        """Context, to the nearest token, at which the hybrid with bf16 states costs as much as all-MLA; 0 without KDA layers."""
        return round(self.state_bytes / self.saved_bytes_per_token) if self.saved_bytes_per_token else 0

    @property
    def crossover_tokens_fp32(self) -> int:
        """As `crossover_tokens`, with fp32 states."""
        return round(self.state_bytes_fp32 / self.saved_bytes_per_token) if self.saved_bytes_per_token else 0

    def request_bytes(self, tokens: int) -> int:
        """Cache of one request of that many tokens, bf16 states."""
        return self.state_bytes + tokens * self.bytes_per_token

    def all_mla_request_bytes(self, tokens: int) -> int:
        """Cache of the same request if every layer were MLA."""
        return tokens * self.all_mla_bytes_per_token


def footprint(config: ModelConfig) -> Footprint:
    """The footprint of a configuration, its parameters counted on the network itself (built without memory for its weights)."""
    with torch.device("meta"):
        model = Decoder(config)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(counts.values())
    routed = sum(n for name, n in counts.items() if ".experts_" in name)
    idle = routed - routed * config.num_experts_per_token // config.num_experts
    matrices = len(config.kda_layers) * config.kda_num_heads * config.kda_head_dim**2
    convolutions = len(config.kda_layers) * (config.short_conv_kernel_size - 1) * 3 * config.kda_width * _BF16
    row = config.latent_cache_width * _BF16
    return Footprint(
        total_parameters=total,
        active_parameters=total - idle - counts["embed_tokens.weight"],
        state_bytes=matrices * _BF16 + convolutions,
        state_bytes_fp32=matrices * _FP32 + convolutions,
        bytes_per_token=len(config.mla_layers) * row,
        all_mla_bytes_per_token=config.num_layers * row,
    )


def flops_per_token(config: ModelConfig, footprint: Footprint, context: int) -> int:
    """Floating-point operations of decoding one token after `context` others: two per active weight, seven per entry of a KDA
    state (decay 1, erase 2, write 2, read 2), and two per number of each latent row that MLA scores and mixes, for each head."""
    state = len(config.kda_layers) * config.kda_num_heads * config.kda_head_dim**2
    rows = len(config.mla_layers) * config.num_attention_heads * (config.latent_cache_width + config.kv_lora_rank)
    return 2 * footprint.active_parameters + 7 * state + 2 * rows * context
