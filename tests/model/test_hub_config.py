"""config.json of both families: what is read, what is written, and one sentence for everything that is wrong."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import UserError
from perilune.model.config import ModelConfig
from perilune.model.hub_config import config_from_json, config_to_json, read_config
from perilune.model.presets import PRESETS, kimi_k3, kimi_linear
from tests.model.tiny_models import kimi_linear_config

GOLDEN = Path(__file__).parents[1] / "golden"

KIMI_K3 = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},
    "dtype": "bfloat16",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "media_placeholder_token_id": 163605,
    "tie_word_embeddings": False,
    "transformers_version": "4.56.2",
    "vision_config": {
        "vt_num_hidden_layers": 27, "vt_hidden_size": 1024, "qkv_hidden_size": 1536, "vt_intermediate_size": 4096, "patch_size": 14,
        "init_pos_emb_height": 64, "init_pos_emb_width": 64, "init_pos_emb_time": 4, "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool", "mm_projector_type": "patchmergerv2", "text_hidden_size": 7168,
    },
    "text_config": {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16", "use_cache": True,
        "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 93, "num_attention_heads": 96, "num_key_value_heads": 96,
        "intermediate_size": 33792, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5, "initializer_range": 0.02, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True,
        "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "topk_method": "noaux_tc",
        "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "attn_res_block_size": 12, "num_nextn_predict_layers": 0, "max_position_embeddings": 1048576, "tie_word_embeddings": False,
        "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
        "linear_attn_config": {
            "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True,
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [layer for layer in range(1, 93) if layer % 4],
        },
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 32}}},
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"],
        },
    },
}  # fmt: skip

KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16", "head_dim": 72, "rope_theta": 10000.0,
    "rope_scaling": None, "vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 9216, "hidden_act": "silu", "rms_norm_eps": 1e-5, "initializer_range": 0.02,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
    "model_max_length": 1048576, "tie_word_embeddings": False, "use_cache": True, "transformers_version": "4.56.2",
    "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
    "linear_attn_config": {
        "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    },
}  # fmt: skip


def test_the_released_configs_parse_to_the_presets():
    assert config_from_json(KIMI_K3, "config.json") == kimi_k3()
    assert config_from_json(KIMI_LINEAR, "config.json") == kimi_linear()


def test_the_golden_k3_config_parses_to_its_fields():
    expected = ModelConfig(
        vocab_size=256, hidden_size=64, attention=("kda", "kda", "kda", "mla") * 2 + ("mla",), max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, kda_num_heads=3, kda_head_dim=32, gate_lower_bound=-5.0, full_rank_gate=True,
        num_attention_heads=3, q_lora_rank=28, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
        mla_output_gate=True, intermediate_size=96, num_experts=8, num_experts_per_token=2, num_shared_experts=2,
        moe_intermediate_size=24, routed_latent_size=40, situ_beta=4.0, situ_linear_beta=25.0, attn_res_block_size=4,
    )  # fmt: skip
    assert read_config(GOLDEN / "k3-tiny") == expected
    assert read_config(GOLDEN / "k3-tiny" / "config.json") == expected


def test_the_golden_kimi_linear_config_parses_to_its_fields():
    assert read_config(GOLDEN / "kimi-linear-tiny") == ModelConfig(
        vocab_size=256, hidden_size=64, attention=("kda", "kda", "kda", "mla", "kda"), max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, kda_num_heads=3, kda_head_dim=32,
        num_attention_heads=3, kv_lora_rank=28, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24, intermediate_size=128,
        num_experts=8, num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=32, routed_scaling_factor=2.446,
    )  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_writing_and_reading_a_preset_gives_it_back(name):
    config = PRESETS[name]()
    data = json.loads(json.dumps(config_to_json(config, "bfloat16")))
    assert config_from_json(data, "config.json") == config
    assert data["model_type"] == ("kimi_k3" if config.is_k3 else "kimi_linear")
    assert data["dtype"] == "bfloat16"


@given(
    attention=st.lists(st.sampled_from(["kda", "mla"]), min_size=1, max_size=9).map(tuple),
    optional=st.fixed_dictionaries(
        {},
        optional={
            "gate_lower_bound": st.sampled_from([-5.0, -0.5]), "full_rank_gate": st.booleans(), "mla_output_gate": st.booleans(),
            "q_lora_rank": st.integers(1, 9), "routed_latent_size": st.integers(1, 9), "attn_res_block_size": st.integers(1, 9),
            "renormalize": st.booleans(), "num_shared_experts": st.integers(0, 3), "first_k_dense": st.integers(0, 1),
            "short_conv_kernel_size": st.integers(2, 6), "bos_token_id": st.integers(0, 31), "rms_norm_eps": st.sampled_from([1e-6, 1e-5]),
        },
    ),
    situ=st.sampled_from([{}, {"situ_beta": 4.0}, {"situ_beta": 1.0, "situ_linear_beta": 25.0}]),
)  # fmt: skip
def test_any_combination_of_parts_survives_writing_and_reading(attention, optional, situ):
    config = kimi_linear_config(attention=attention, **optional, **situ)
    assert config_from_json(json.loads(json.dumps(config_to_json(config, "float32"))), "config.json") == config


def refused(data: dict, *needles: str) -> None:
    """Reading the config fails with one sentence that names its source, every needle and what to do."""
    with pytest.raises(UserError) as caught:
        config_from_json(data, "dir/config.json")
    message = str(caught.value)
    assert message.startswith("dir/config.json: ")
    assert "\n" not in message
    assert message.endswith(("; correct the file", "use a Perilune that knows them", "; give a model of these families"))
    for needle in needles:
        assert needle in message


def changed(base: dict, *, linear: dict | None = None, without: tuple[str, ...] = (), **fields) -> dict:
    """A copy with fields of the text model, and of its linear_attn_config, replaced or left out."""
    data = copy.deepcopy(base)
    text = data.get("text_config", data)
    text.update(fields)
    text["linear_attn_config"].update(linear or {})
    for key in without:
        (text if key in text else text["linear_attn_config"]).pop(key)
    return data


@pytest.mark.parametrize("base", [KIMI_K3, KIMI_LINEAR], ids=["k3", "kimi-linear"])
@pytest.mark.parametrize(
    ("fields", "needles"),
    [
        ({"rope_interleave": True, "aux_free": 1}, ("unknown fields: aux_free, rope_interleave",)),
        ({"num_experts_per_token": 896}, ("num_experts_per_token (896)", "below num_experts")),
        ({"num_key_value_heads": 8}, ("num_key_value_heads (8)", "num_attention_heads")),
        ({"mla_use_nope": False}, ("mla_use_nope must be True", "got False")),
        ({"tie_word_embeddings": True}, ("tie_word_embeddings must be False", "got True")),
        ({"topk_group": 2}, ("topk_group must be 1", "got 2")),
        ({"num_expert_group": 8}, ("num_expert_group must be 1", "got 8")),
        ({"n_group": 8}, ("n_group must be 1", "got 8")),
        ({"moe_layer_freq": 2}, ("moe_layer_freq must be 1", "got 2")),
        ({"num_nextn_predict_layers": 1}, ("num_nextn_predict_layers must be 0", "got 1")),
        ({"moe_router_activation_func": "softmax"}, ("moe_router_activation_func must be 'sigmoid'", "got 'softmax'")),
        ({"topk_method": "greedy"}, ("topk_method must be 'noaux_tc'", "got 'greedy'")),
        ({"rope_scaling": {"type": "yarn"}}, ("rope_scaling must be None", "yarn")),
        ({"hidden_act": "gelu"}, ("hidden_act", "'silu' or 'situ'", "'gelu'")),
        ({"moe_renormalize": True, "norm_topk_prob": False}, ("moe_renormalize", "norm_topk_prob", "differ")),
        ({"latent_moe_use_norm": False, "routed_expert_hidden_size": 8}, ("latent_moe_use_norm",)),
        ({"hidden_size": "wide"}, ("hidden_size", "valid integer")),
        ({"hidden_size": None}, ("hidden_size", "valid integer")),
        ({"hidden_size": 2304.5}, ("hidden_size", "valid integer")),
        ({"hidden_size": [2304]}, ("hidden_size", "valid integer")),
        ({"hidden_size": 0}, ("hidden_size", "greater than 0")),
        ({"rms_norm_eps": -1e-5}, ("rms_norm_eps", "greater than 0")),
        ({"routed_scaling_factor": "large"}, ("routed_scaling_factor", "valid number")),
        ({"eos_token_id": 163840}, ("eos_token_id 163840", "outside the vocabulary of 163840")),
        ({"first_k_dense_replace": -1}, ("first_k_dense_replace", "greater than or equal to 0")),
        ({"first_k_dense_replace": 94}, ("first_k_dense", "94", "number of layers")),
        ({"num_hidden_layers": "27"}, ("num_hidden_layers", "'27'")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "got 0")),
        ({"linear_attn_config": {}}, ("linear_attn_config.kda_layers and full_attn_layers", "miss layers")),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused_by_name(base, fields, needles):
    data = changed(base)
    data.get("text_config", data).update(fields)
    refused(data, *needles)


@pytest.mark.parametrize(
    ("linear", "needles"),
    [
        ({"kda_layers": [1, 2, 3]}, ("partition the layers 1..27", "miss layers", "[5, 6, 7, 9")),
        ({"full_attn_layers": [4, 8, 12, 16, 20, 24, 26, 27]}, ("name a layer twice: [26]",)),
        ({"full_attn_layers": [4, 4, 8, 12, 16, 20, 24, 27]}, ("name a layer twice: [4]",)),
        ({"full_attn_layers": [4, 8, 12, 16, 20, 24, 27, 28]}, ("name layers that do not exist: [28]",)),
        ({"full_attn_layers": [0, 4, 8, 12, 16, 20, 24, 27]}, ("name layers that do not exist: [0]",)),
        ({"kda_layers": 5}, ("linear_attn_config.kda_layers must be a list of layer numbers", "got 5")),
        ({"kda_layers": None}, ("linear_attn_config.kda_layers must be a list of layer numbers", "got None")),
        ({"full_attn_layers": ["4"]}, ("linear_attn_config.full_attn_layers must be a list of layer numbers", "['4']")),
        ({"head_dim": "128x"}, ("linear_attn_config.head_dim", "valid integer")),
        ({"num_heads": None}, ("linear_attn_config.num_heads", "valid integer")),
        ({"gate_lower_bound": 5.0}, ("linear_attn_config.gate_lower_bound", "less than 0")),
        ({"short_conv_kernel_size": 1}, ("linear_attn_config.short_conv_kernel_size", "greater than or equal to 2")),
        ({"use_full_rank_gate": "perhaps"}, ("linear_attn_config.use_full_rank_gate", "valid boolean")),
        ({"conv_bias": True}, ("linear_attn_config has unknown fields: conv_bias",)),
    ],
    ids=str,
)
def test_a_wrong_linear_attention_is_refused_by_name(linear, needles):
    refused(changed(KIMI_LINEAR, linear=linear), *needles)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_experts", "num_experts_per_token", "kv_lora_rank", "intermediate_size"])
def test_a_missing_field_is_named(key):
    refused(changed(KIMI_LINEAR, without=(key,)), key, "required")


@pytest.mark.parametrize("linear", ["absent", None, 3])
def test_a_model_without_linear_attention_is_refused(linear):
    data = changed(KIMI_LINEAR)
    data["linear_attn_config"] = linear
    if linear == "absent":
        del data["linear_attn_config"]
    refused(data, "linear_attn_config is missing", "not a Kimi K3 or Kimi Linear model")


def test_missing_number_of_layers_and_missing_head_dim_are_named():
    refused(changed(KIMI_LINEAR, without=("num_hidden_layers",)), "num_hidden_layers must be a positive number")
    data = changed(KIMI_LINEAR)
    del data["linear_attn_config"]["head_dim"]
    refused(data, "linear_attn_config.head_dim")


def test_situ_betas_default_to_one_and_uncapped_and_zero_is_refused():
    config = config_from_json(changed(KIMI_K3, without=("activation_situ_beta", "activation_situ_linear_beta")), "")
    assert (config.situ_beta, config.situ_linear_beta) == (1.0, None)
    refused(changed(KIMI_K3, activation_situ_beta=0.0), "activation_situ_beta", "greater than 0")
    assert config_from_json(changed(KIMI_K3, hidden_act="silu"), "").situ_beta is None


def test_other_model_types_are_refused():
    for model_type in ("llama", None):
        refused(KIMI_LINEAR | {"model_type": model_type}, f"got {model_type!r}")
    refused({}, "got None")


def test_a_k3_config_is_checked_at_both_levels():
    refused(KIMI_K3 | {"audio_config": {}}, "unknown fields: audio_config", "remove them")
    for text in (None, [], "text"):
        refused(KIMI_K3 | {"text_config": text}, "text_config must be an object")
    data = changed(KIMI_K3)
    del data["text_config"]
    refused(data, "text_config must be an object")


def test_renormalisation_is_read_under_either_of_its_names():
    data = changed(KIMI_LINEAR, without=("moe_renormalize",), norm_topk_prob=False)
    assert config_from_json(data, "").renormalize is False


@pytest.mark.parametrize("content", ["{", "", "[1, 2]", '"kimi"', b"\xff\xfe\x00"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"config.json (is not a readable JSON file|holds no JSON object)") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_directory_without_one_say_what_to_give(tmp_path):
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"does not exist: give a Hub directory or its config.json"):
            read_config(path)


@pytest.mark.parametrize(("field", "value"), [("hidden_size", "64"), ("num_experts", True), ("mla_use_output_gate", 1)])
def test_a_value_of_another_type_is_refused_and_not_converted(field, value):
    data = json.loads((GOLDEN / "k3-tiny" / "config.json").read_text())
    data["text_config"][field] = value
    with pytest.raises(UserError, match=field):
        config_from_json(data, "config.json")
