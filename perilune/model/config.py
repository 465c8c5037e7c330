"""ModelConfig: the network's dimensions, checked. `hub_config.py` reads and writes the releases' config.json."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

LATENT_NORM_EPSILON = 1e-6
"""Epsilon of MLA's two latent norms, whatever rms_norm_eps says: a class default of the released code, not in its config."""

AttentionKind = Literal["kda", "mla"]
Size = Field(gt=0)


class ModelConfig(BaseModel):
    """Dimensions of one hybrid decoder. `gate_lower_bound=None` is the softplus gate, `routed_latent_size=None` no latent,
    `attn_res_block_size=None` plain residuals, `q_lora_rank=None` one query projection, `situ_beta=None` SwiGLU."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    vocab_size: int = Size
    hidden_size: int = Size
    attention: tuple[AttentionKind, ...] = Field(strict=False)
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    initializer_range: float = Field(default=0.02, gt=0)
    max_position_embeddings: int = Field(default=4096, gt=0)
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    kda_num_heads: int = Size
    kda_head_dim: int = Size
    short_conv_kernel_size: int = Field(default=4, ge=2)
    gate_lower_bound: float | None = Field(default=None, lt=0)
    full_rank_gate: bool = False

    num_attention_heads: int = Size
    q_lora_rank: int | None = Field(default=None, gt=0)
    kv_lora_rank: int = Size
    qk_nope_head_dim: int = Size
    qk_rope_head_dim: int = Size
    v_head_dim: int = Size
    mla_output_gate: bool = False

    intermediate_size: int = Size
    first_k_dense: int = Field(default=1, ge=0)
    num_experts: int = Size
    num_experts_per_token: int = Size
    num_shared_experts: int = Field(default=1, ge=0)
    moe_intermediate_size: int = Size
    routed_latent_size: int | None = Field(default=None, gt=0)
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    renormalize: bool = True
    situ_beta: float | None = Field(default=None, gt=0)
    situ_linear_beta: float | None = Field(default=None, gt=0)
    attn_res_block_size: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> "ModelConfig":
        if not self.attention:
            raise ValueError("attention lists no layer: name 'kda' or 'mla' for each")
        if self.num_experts_per_token >= self.num_experts:
            raise ValueError(
                f"num_experts_per_token ({self.num_experts_per_token}) must be below num_experts ({self.num_experts}): "
                "balancing needs a next-best expert"
            )
        if self.first_k_dense > len(self.attention):
            raise ValueError(f"first_k_dense ({self.first_k_dense}) exceeds the number of layers ({len(self.attention)})")
        if self.situ_beta is None and self.situ_linear_beta is not None:
            raise ValueError("situ_linear_beta without situ_beta: the up branch is capped only in SiTU-GLU")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < self.vocab_size:
                raise ValueError(f"{name} {token} lies outside the vocabulary of {self.vocab_size}")
        return self

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based indices of the KDA layers."""
        return tuple(i for i, kind in enumerate(self.attention) if kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based indices of the MLA layers."""
        return tuple(i for i, kind in enumerate(self.attention) if kind == "mla")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based indices of the layers with routed experts."""
        return tuple(range(self.first_k_dense, self.num_layers))

    @property
    def kda_width(self) -> int:
        """Channels of each of q, k, v in a KDA layer: heads * head_dim."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def latent_cache_width(self) -> int:
        """Numbers that an MLA layer keeps per token: the normalised latent and the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def is_k3(self) -> bool:
        """Whether the network needs Kimi K3's config family; a network without K3's parts is a Kimi Linear model."""
        return any(
            (
                self.gate_lower_bound is not None,
                self.full_rank_gate,
                self.mla_output_gate,
                self.routed_latent_size is not None,
                self.attn_res_block_size is not None,
                self.q_lora_rank is not None,
                self.situ_beta is not None,
            )
        )


def explain(error: ValidationError, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """The first complaint of a pydantic error as 'field: what is wrong'; `names` says what a field is called where the user wrote it."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    where = names.get(where, where)
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
