"""The released models' dimensions, written out a second time from their reports, and the preset names."""

import pytest

from perilune.errors import UserError
from perilune.model.config import ModelConfig
from perilune.model.presets import PRESETS, k3_tiny, kimi_k3, kimi_linear, preset


def test_kimi_k3_has_the_published_dimensions():
    config = kimi_k3()
    assert config.num_layers == 93
    assert config.mla_layers == (*range(3, 93, 4), 92)
    assert len(config.kda_layers) == 69
    assert config.moe_layers == tuple(range(1, 93))
    assert config.kda_width == 96 * 128 == 12288
    assert config.latent_cache_width == 576
    assert (config.hidden_size, config.vocab_size, config.intermediate_size) == (7168, 163840, 33792)
    assert (config.num_experts, config.num_experts_per_token, config.num_shared_experts) == (896, 16, 2)
    assert (config.moe_intermediate_size, config.routed_latent_size) == (3072, 3584)
    assert (config.situ_beta, config.situ_linear_beta, config.gate_lower_bound) == (4.0, 25.0, -5.0)
    assert config.routed_scaling_factor == 1.0
    assert config.attn_res_block_size == 12
    assert config.is_k3


def test_kimi_linear_has_the_published_dimensions_and_none_of_k3s_parts():
    config = kimi_linear()
    assert config.num_layers == 27
    assert config.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert len(config.kda_layers) == 20
    assert (config.hidden_size, config.kda_width, config.intermediate_size) == (2304, 4096, 9216)
    assert (config.num_experts, config.num_experts_per_token, config.num_shared_experts) == (256, 8, 1)
    assert config.routed_scaling_factor == 2.446
    assert config.situ_beta is config.routed_latent_size is config.attn_res_block_size is config.gate_lower_bound is None
    assert not config.is_k3


def test_k3_tiny_has_every_part_of_k3_and_both_kinds_of_layer():
    tiny = k3_tiny()
    for field in ModelConfig.model_fields:
        unused = getattr(kimi_k3(), field) in (None, False)
        assert unused or getattr(tiny, field) not in (None, False) or field.endswith("_token_id"), field
    assert tiny.kda_layers
    assert tiny.mla_layers
    assert tiny.num_layers > tiny.attn_res_block_size
    assert k3_tiny(77).vocab_size == 77


def test_presets_are_found_by_name_and_unknown_names_list_the_known():
    assert preset("kimi-k3") == kimi_k3()
    assert preset("kimi-linear-48b-a3b") == kimi_linear()
    assert preset("k3-tiny") == k3_tiny()
    with pytest.raises(UserError, match="unknown model 'kimi': known presets are " + ", ".join(PRESETS)):
        preset("kimi")
