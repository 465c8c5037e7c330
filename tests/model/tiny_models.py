"""Two networks small enough for fp64 tests, one with every part of K3 and one with those of Kimi Linear, every weight random."""

import torch

from perilune.model.batch import SequenceLayout
from perilune.model.config import ModelConfig
from perilune.model.decoder import Decoder


def k3_config(**changes: object) -> ModelConfig:
    """K3's parts: bounded full-rank gate, query latent, gated MLA, latent experts, SiTU-GLU, attention residuals in blocks of two."""
    fields = {
        "vocab_size": 32, "hidden_size": 16, "attention": ("kda", "mla", "kda", "kda", "mla"),
        "kda_num_heads": 2, "kda_head_dim": 6, "gate_lower_bound": -5.0, "full_rank_gate": True,
        "num_attention_heads": 3, "q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 5,
        "mla_output_gate": True, "intermediate_size": 20, "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 2,
        "moe_intermediate_size": 8, "routed_latent_size": 12, "situ_beta": 4.0, "situ_linear_beta": 25.0, "attn_res_block_size": 2,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


def kimi_linear_config(**changes: object) -> ModelConfig:
    """Kimi Linear's parts: softplus and low-rank gates, plain query projection, ungated MLA, experts on the hidden state, SwiGLU."""
    fields = {
        "vocab_size": 32, "hidden_size": 16, "attention": ("kda", "kda", "mla", "kda"), "kda_num_heads": 2, "kda_head_dim": 6,
        "num_attention_heads": 3, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 5,
        "intermediate_size": 20, "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 8,
        "routed_scaling_factor": 2.446,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


def cast(model: Decoder, dtype: torch.dtype) -> Decoder:
    """The model in another dtype, its selection biases in fp32 as they must be."""
    biases = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model = model.to(dtype)
    for name, bias in biases.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, bias)
    return model


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """Initialised, then every zero, one and tiny number made random, so that a part that is left out or mixed up shows."""
    model = Decoder(config)
    model.reset_parameters(seed)
    rng = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=rng)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm.weight" in name or "layernorm" in name:
                parameter.copy_(1 + 0.2 * normal(parameter))
            elif name.endswith("_res.proj"):
                parameter.copy_(normal(parameter))
            elif parameter.ndim >= 2 and "_conv" not in name:
                parameter.copy_(normal(parameter) * (1.5 if "embed" in name else parameter.shape[-1] ** -0.5))
            elif name.endswith("A_log"):
                parameter.copy_(0.3 * normal(parameter))
        for buffer in model.buffers():
            buffer.copy_(0.1 * normal(buffer))
    return cast(model, dtype)


def random_ids(length: int, vocab_size: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


def packed(model: Decoder, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of whole sequences in one forward without a state: what every split of them must reproduce."""
    lengths = tuple(len(s) for s in sequences)
    return list(model(torch.cat(sequences), SequenceLayout(lengths)).split(lengths))
