"""Named model configurations: the two released models and the small ones that this project trains."""

from collections.abc import Callable

from perilune.errors import UserError
from perilune.model.config import AttentionKind, ModelConfig


def _hybrid(num_layers: int, extra_mla: tuple[int, ...] = ()) -> tuple[AttentionKind, ...]:
    """Three KDA layers and one MLA layer in turn, with the 0-based layers of `extra_mla` MLA as well."""
    return tuple("mla" if i % 4 == 3 or i in extra_mla else "kda" for i in range(num_layers))


def kimi_k3() -> ModelConfig:
    """Kimi K3 (arXiv 2607.24653, Table 1, and the released config.json)."""
    return ModelConfig(
        vocab_size=163840, hidden_size=7168, attention=_hybrid(93, extra_mla=(92,)), max_position_embeddings=1048576,
        bos_token_id=163584, eos_token_id=163586, pad_token_id=163839,
        kda_num_heads=96, kda_head_dim=128, gate_lower_bound=-5.0, full_rank_gate=True,
        num_attention_heads=96, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        mla_output_gate=True, intermediate_size=33792, num_experts=896, num_experts_per_token=16, num_shared_experts=2,
        moe_intermediate_size=3072, routed_latent_size=3584, situ_beta=4.0, situ_linear_beta=25.0, attn_res_block_size=12,
    )  # fmt: skip


def kimi_linear() -> ModelConfig:
    """Kimi-Linear-48B-A3B (arXiv 2510.26692 and the released config.json)."""
    return ModelConfig(
        vocab_size=163840, hidden_size=2304, attention=_hybrid(27, extra_mla=(26,)), max_position_embeddings=1048576,
        bos_token_id=163584, eos_token_id=163586, pad_token_id=163839,
        kda_num_heads=32, kda_head_dim=128, num_attention_heads=32, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, intermediate_size=9216, num_experts=256, num_experts_per_token=8, num_shared_experts=1,
        moe_intermediate_size=1024, routed_scaling_factor=2.446,
    )  # fmt: skip


def k3_tiny(vocab_size: int = 1024) -> ModelConfig:
    """Every part of K3 at a size that a laptop core trains in minutes: 8 layers, 6 KDA and 2 MLA, 16 experts."""
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=96, attention=_hybrid(8),
        kda_num_heads=3, kda_head_dim=32, gate_lower_bound=-5.0, full_rank_gate=True,
        num_attention_heads=3, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32,
        mla_output_gate=True, intermediate_size=256, num_experts=16, num_experts_per_token=2, num_shared_experts=1,
        moe_intermediate_size=48, routed_latent_size=48, situ_beta=4.0, situ_linear_beta=25.0, attn_res_block_size=4,
    )  # fmt: skip


PRESETS: dict[str, Callable[[], ModelConfig]] = {"kimi-k3": kimi_k3, "kimi-linear-48b-a3b": kimi_linear, "k3-tiny": k3_tiny}


def preset(name: str) -> ModelConfig:
    """The configuration of that name; UserError with the known names otherwise."""
    if name not in PRESETS:
        raise UserError(f"unknown model {name!r}: known presets are {', '.join(PRESETS)}; a Hub directory or a config.json works too")
    return PRESETS[name]()
