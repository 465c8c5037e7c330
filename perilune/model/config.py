"""ModelConfig: the network's dimensions, checked; read from and written to the config.json of Kimi K3 and Kimi Linear.

K3 nests the text model in `text_config` of an outer `kimi_k3` config; Kimi Linear is flat. Layer lists are 1-based there and
must partition the layers: a default of "KDA unless listed" would hide a missing layer.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from perilune.errors import UserError

LATENT_NORM_EPSILON = 1e-6
"""Epsilon of MLA's two latent norms, whatever rms_norm_eps says: a class default of the released code, not in its config."""

AttentionKind = Literal["kda", "mla"]
Size = Field(gt=0)


class ModelConfig(BaseModel):
    """Dimensions of one hybrid decoder. `gate_lower_bound=None` is the softplus gate, `routed_latent_size=None` no latent,
    `attn_res_block_size=None` plain residuals, `q_lora_rank=None` one query projection, `situ_beta=None` SwiGLU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Size
    hidden_size: int = Size
    attention: tuple[AttentionKind, ...]
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


# Hub key -> field, for keys that map one to one.
_RENAMED = {
    "first_k_dense_replace": "first_k_dense",
    "moe_renormalize": "renormalize",
    "routed_expert_hidden_size": "routed_latent_size",
    "mla_use_output_gate": "mla_output_gate",
    "activation_situ_beta": "situ_beta",
    "activation_situ_linear_beta": "situ_linear_beta",
}
_SAME = (  # noqa: SIM905
    "vocab_size hidden_size rms_norm_eps initializer_range bos_token_id eos_token_id pad_token_id num_attention_heads q_lora_rank "
    "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size num_experts num_experts_per_token num_shared_experts "
    "moe_intermediate_size routed_scaling_factor attn_res_block_size max_position_embeddings"
).split()
# Field -> where a config.json has it, for messages about a file.
_HUB_NAMES = {name: hub for hub, name in _RENAMED.items()} | {
    "kda_num_heads": "linear_attn_config.num_heads",
    "kda_head_dim": "linear_attn_config.head_dim",
    "short_conv_kernel_size": "linear_attn_config.short_conv_kernel_size",
    "gate_lower_bound": "linear_attn_config.gate_lower_bound",
    "full_rank_gate": "linear_attn_config.use_full_rank_gate",
}
# Keys that may stand in a config.json with exactly these values; anything else would need a part this network does not have.
_FIXED: dict[str, tuple[Any, ...]] = {
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "num_expert_group": (1,),
    "n_group": (1,),
    "topk_group": (1,),
    "moe_layer_freq": (1,),
    "num_nextn_predict_layers": (0,),
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "rope_scaling": (None,),
    "model_type": ("kimi_linear",),
    "use_grouped_topk": (True, False),
    "latent_moe_use_norm": (True, False),
}
# Keys that do not describe the network's mathematics: written by libraries, or kept by the releases for old code.
_IGNORED = frozenset(
    (  # noqa: SIM905
        "architectures auto_map dtype torch_dtype transformers_version use_cache head_dim rope_theta _name_or_path "
        "quantization_config return_dict output_attentions output_hidden_states pretraining_tp chunk_size_feed_forward id2label "
        "label2id problem_type is_encoder_decoder seq_aux aux_loss_alpha ep_size"
    ).split()
)
_LINEAR_ATTENTION = frozenset(
    "num_heads head_dim short_conv_kernel_size gate_lower_bound use_full_rank_gate full_attn_layers kda_layers".split()  # noqa: SIM905
)
_OUTER = frozenset(
    "model_type text_config vision_config media_placeholder_token_id image_token_id use_unified_vision_chunk".split()  # noqa: SIM905
)


def _layer_list(linear: dict[str, Any], key: str) -> list[int]:
    layers = linear.get(key, [])
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ValueError(f"linear_attn_config.{key} must be a list of layer numbers, got {layers!r}")
    return layers


def _attention_kinds(num_layers: int, kda: list[int], mla: list[int]) -> tuple[AttentionKind, ...]:
    """Kinds of all layers from the Hub's two 1-based lists, which must partition 1..num_layers."""
    twice = sorted({layer for layer in kda + mla if (kda + mla).count(layer) > 1})
    missing = sorted(set(range(1, num_layers + 1)) - set(kda) - set(mla))
    outside = sorted(layer for layer in {*kda, *mla} if not 1 <= layer <= num_layers)
    for what, layers in (("name a layer twice", twice), ("miss layers", missing), ("name layers that do not exist", outside)):
        if layers:
            raise ValueError(
                f"linear_attn_config.kda_layers and full_attn_layers must partition the layers 1..{num_layers}, but they {what}: {layers}"
            )
    return tuple("kda" if layer in kda else "mla" for layer in range(1, num_layers + 1))


def _from_hub(text: dict[str, Any]) -> ModelConfig:
    rest = dict(text)
    linear = rest.pop("linear_attn_config", None)
    if not isinstance(linear, dict):
        raise ValueError("linear_attn_config is missing or no object: without it this is not a Kimi K3 or Kimi Linear model")
    if unknown := sorted(set(linear) - _LINEAR_ATTENTION):
        raise ValueError(f"linear_attn_config has unknown fields: {', '.join(unknown)}")
    fields: dict[str, Any] = {}
    for key in _SAME:
        if key in rest:
            fields[key] = rest.pop(key)
    for key, name in _RENAMED.items():
        if key in rest:
            fields[name] = rest.pop(key)
    if (longest := rest.pop("model_max_length", None)) is not None:
        fields.setdefault("max_position_embeddings", longest)
    if (normed := rest.pop("norm_topk_prob", None)) is not None and fields.setdefault("renormalize", normed) != normed:
        raise ValueError("moe_renormalize and norm_topk_prob are two names of one setting, and they differ")
    num_layers = rest.pop("num_hidden_layers", None)
    if type(num_layers) is not int or num_layers < 1:
        raise ValueError(f"num_hidden_layers must be a positive number, got {num_layers!r}")
    heads = rest.pop("num_key_value_heads", fields.get("num_attention_heads"))
    if heads != fields.get("num_attention_heads"):
        raise ValueError(
            f"num_key_value_heads ({heads}) must equal num_attention_heads ({fields.get('num_attention_heads')}): MLA has one set of heads"
        )
    activation = rest.pop("hidden_act", "silu")
    if activation == "silu":
        fields["situ_beta"] = fields["situ_linear_beta"] = None
    elif activation == "situ":
        # A missing or null beta means one, as in the released code.
        fields["situ_beta"] = 1.0 if fields.get("situ_beta") is None else fields["situ_beta"]
    else:
        raise ValueError(f"hidden_act is 'silu' or 'situ', got {activation!r}")
    if fields.get("routed_latent_size") is not None and rest.get("latent_moe_use_norm") is False:
        raise ValueError("latent_moe_use_norm false with a routed latent: the network always norms the routed sum")
    for key, allowed in _FIXED.items():
        if key in rest and rest.pop(key) not in allowed:
            raise ValueError(f"{key} must be {' or '.join(repr(a) for a in allowed)} for this network, got {text[key]!r}")
    if unknown := sorted(set(rest) - _IGNORED):
        raise ValueError(f"unknown fields: {', '.join(unknown)}")
    return ModelConfig(
        attention=_attention_kinds(num_layers, _layer_list(linear, "kda_layers"), _layer_list(linear, "full_attn_layers")),
        kda_num_heads=linear.get("num_heads"),
        kda_head_dim=linear.get("head_dim"),
        short_conv_kernel_size=linear.get("short_conv_kernel_size", 4),
        gate_lower_bound=linear.get("gate_lower_bound"),
        full_rank_gate=linear.get("use_full_rank_gate", False),
        **fields,
    )


def explain(error: ValidationError, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """The first complaint of a pydantic error as 'field: what is wrong'; `names` says what a field is called where the user wrote it."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    where = names.get(where, where)
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def config_from_json(data: dict[str, Any], source: str) -> ModelConfig:
    """ModelConfig from a parsed config.json. Raises UserError that names the field; `source` says where it came from."""
    text = data
    if data.get("model_type") == "kimi_k3":
        inner = data.get("text_config")
        if not isinstance(inner, dict):
            raise UserError(f"{source}: text_config must be an object that describes the text model, got {inner!r}; correct the file")
        text = inner
        # The outer level may repeat the text model's token ids and dtype.
        unknown = set(data) - _OUTER - _IGNORED - {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"}
        if unknown:
            raise UserError(f"{source}: unknown fields: {', '.join(sorted(unknown))}; remove them or use a Perilune that knows them")
    elif data.get("model_type") != "kimi_linear":
        raise UserError(
            f"{source}: model_type must be 'kimi_k3' or 'kimi_linear', got {data.get('model_type')!r}; give a model of these families"
        )
    try:
        return _from_hub(text)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(error, _HUB_NAMES)}; correct the file") from None
    except ValueError as error:
        raise UserError(f"{source}: {error}; correct the file") from None


def read_config(path: Path) -> ModelConfig:
    """ModelConfig from a config.json, or from the Hub directory that holds one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: give a Hub directory or its config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{file} is not a readable JSON file ({error}); copy it again from its source") from None
    if not isinstance(data, dict):
        raise UserError(f"{file} holds no JSON object: it is not a config.json")
    return config_from_json(data, str(file))


def config_to_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a model: K3's nested form when a part of K3 is used, else Kimi Linear's flat form."""
    text: dict[str, Any] = {key: getattr(config, key) for key in _SAME}
    text |= {hub: getattr(config, name) for hub, name in _RENAMED.items()}
    text |= {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_attention_heads,
        "hidden_act": "silu" if config.situ_beta is None else "situ",
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    linear: dict[str, Any] = {
        "num_heads": config.kda_num_heads,
        "head_dim": config.kda_head_dim,
        "short_conv_kernel_size": config.short_conv_kernel_size,
        "full_attn_layers": [i + 1 for i in config.mla_layers],
        "kda_layers": [i + 1 for i in config.kda_layers],
    }
    text["linear_attn_config"] = linear
    if not config.is_k3:
        for key in (
            "activation_situ_beta",
            "activation_situ_linear_beta",
            "routed_expert_hidden_size",
            "mla_use_output_gate",
            "attn_res_block_size",
        ):
            del text[key]
        return text
    linear |= {"gate_lower_bound": config.gate_lower_bound, "use_full_rank_gate": config.full_rank_gate}
    text["latent_moe_use_norm"] = config.routed_latent_size is not None
    tokens = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
        "dtype": dtype,
        "tie_word_embeddings": False,
        **tokens,
    }
