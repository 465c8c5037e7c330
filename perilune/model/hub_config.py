"""The config.json of Kimi K3 and Kimi Linear, read into a ModelConfig and written from one.

K3 nests the text model in `text_config` of an outer `kimi_k3` config; Kimi Linear is flat. Layer lists are 1-based there and
must partition the layers: a default of "KDA unless listed" would hide a missing layer.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from perilune.errors import UserError
from perilune.model.config import AttentionKind, ModelConfig, explain

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
    fields |= {
        "attention": _attention_kinds(num_layers, _layer_list(linear, "kda_layers"), _layer_list(linear, "full_attn_layers")),
        "kda_num_heads": linear.get("num_heads"),
        "kda_head_dim": linear.get("head_dim"),
        "short_conv_kernel_size": linear.get("short_conv_kernel_size", 4),
        "gate_lower_bound": linear.get("gate_lower_bound"),
        "full_rank_gate": linear.get("use_full_rank_gate", False),
    }
    return ModelConfig.model_validate(fields)


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
