"""Counts and bytes against the published figures and against formulas written without the network."""

from functools import cache

import pytest
import torch

from perilune.model.config import ModelConfig
from perilune.model.footprint import Footprint, flops_per_token
from perilune.model.footprint import footprint as count
from perilune.model.presets import k3_tiny, kimi_k3, kimi_linear
from perilune.model.state import SequenceState
from tests.model.tiny_models import k3_config, kimi_linear_config

MIB = 2**20


@cache  # K3's 93 layers take a moment to build, even without memory
def footprint(config: ModelConfig) -> Footprint:
    return count(config)


def count_by_formula(c: ModelConfig) -> tuple[int, int]:
    """(all parameters, active ones), from the shapes of the published tensors."""
    d, p, k = c.hidden_size, c.kda_width, c.kda_head_dim
    gate = d * p if c.full_rank_gate else d * k + k * p
    kda = 3 * d * p + p * d + gate + (d * k + k * p) + d * c.kda_num_heads + 3 * p * c.short_conv_kernel_size + c.kda_num_heads + p + k
    heads, query, value = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim, c.num_attention_heads * c.v_head_dim
    mla = d * (c.kv_lora_rank + c.qk_rope_head_dim) + c.kv_lora_rank + c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim)
    mla += value * d * (2 if c.mla_output_gate else 1)
    rank = c.q_lora_rank
    mla += d * heads * query if rank is None else d * rank + rank + rank * heads * query
    latent = c.routed_latent_size or d
    expert = 3 * latent * c.moe_intermediate_size
    rest = 3 * d * c.num_shared_experts * c.moe_intermediate_size + d * c.num_experts
    if c.routed_latent_size:
        rest += 2 * d * latent + latent
    norms = 2 * d * c.num_layers + d
    if c.attn_res_block_size:
        norms += 2 * 2 * d * c.num_layers + 2 * d
    trunk = len(c.kda_layers) * kda + len(c.mla_layers) * mla + norms + c.first_k_dense * 3 * d * c.intermediate_size
    trunk += len(c.moe_layers) * rest
    vocabulary = c.vocab_size * d
    total = trunk + len(c.moe_layers) * c.num_experts * expert + 2 * vocabulary
    return total, trunk + len(c.moe_layers) * c.num_experts_per_token * expert + vocabulary


@pytest.mark.parametrize("config", [kimi_k3(), kimi_linear(), k3_tiny(), k3_config(first_k_dense=2), kimi_linear_config()], ids=range(5))
def test_counting_the_network_equals_the_formulas(config):
    cost = footprint(config)
    assert (cost.total_parameters, cost.active_parameters) == count_by_formula(config)


def test_kimi_k3_has_the_published_size():
    cost = footprint(kimi_k3())
    assert cost.total_parameters == 2_779_484_393_568
    assert cost.active_parameters / 1e9 == pytest.approx(104.2, abs=0.05)


def test_kimi_k3_costs_the_published_memory():
    cost = footprint(kimi_k3())
    assert cost.state_bytes == 232_316_928
    assert cost.state_bytes / MIB == pytest.approx(221.55, abs=0.005)
    assert cost.state_bytes_fp32 / MIB == pytest.approx(428.55, abs=0.005)
    assert cost.bytes_per_token == 27_648
    assert cost.all_mla_bytes_per_token == 107_136
    assert cost.saved_bytes_per_token == 79_488
    assert cost.crossover_tokens == 2_923
    assert cost.crossover_tokens_fp32 == 5_653


def test_a_million_tokens_of_kimi_k3_cost_a_quarter_of_all_mla():
    cost = footprint(kimi_k3())
    million = 2**20
    assert cost.request_bytes(million) / 2**30 == pytest.approx(27.22, abs=0.005)
    assert cost.all_mla_request_bytes(million) / 2**30 == pytest.approx(104.6, abs=0.05)
    assert cost.all_mla_request_bytes(million) / cost.request_bytes(million) == pytest.approx(3.84, abs=0.005)
    assert cost.request_bytes(cost.crossover_tokens) == pytest.approx(cost.all_mla_request_bytes(cost.crossover_tokens), rel=1e-3)


def test_kimi_linear_costs_the_published_figures():
    cost = footprint(kimi_linear())
    assert cost.total_parameters / 1e9 == pytest.approx(49.12, abs=0.005)
    assert cost.active_parameters / 1e9 == pytest.approx(3.11, abs=0.005)
    assert cost.bytes_per_token == 8_064
    assert cost.state_bytes / MIB == pytest.approx(21.4, abs=0.05)


def test_bytes_are_those_of_the_state_that_is_allocated():
    config = k3_config()
    cost = footprint(config)
    state = SequenceState(config, num_slots=1, max_length=7, dtype=torch.bfloat16)

    def size(tensors: dict[int, torch.Tensor]) -> int:
        return sum(t.numel() * t.element_size() for t in tensors.values())

    assert cost.state_bytes_fp32 == size(state.recurrent) + size(state.conv)
    assert cost.state_bytes == size(state.recurrent) // 2 + size(state.conv)
    assert 7 * cost.bytes_per_token == size(state.latents)


def test_models_of_one_kind_of_layer_have_no_crossover():
    mla = footprint(kimi_linear_config(attention=("mla", "mla")))
    assert (mla.state_bytes, mla.crossover_tokens, mla.crossover_tokens_fp32, mla.saved_bytes_per_token) == (0, 0, 0, 0)
    kda = footprint(kimi_linear_config(attention=("kda", "kda")))
    assert kda.bytes_per_token == 0
    assert kda.request_bytes(1000) == kda.state_bytes


def test_decoding_flops_grow_with_context_only_through_mla():
    config = k3_config()
    cost = footprint(config)
    fixed = flops_per_token(config, cost, 0)
    # Three KDA layers of two heads of 6 x 6 states, two MLA layers of three heads over latents of 8 and shared keys of 2.
    assert fixed == 2 * cost.active_parameters + 7 * 3 * 2 * 36
    assert flops_per_token(config, cost, 100) - fixed == 100 * 2 * 3 * 2 * (8 + 2 + 8)
    kda = kimi_linear_config(attention=("kda", "kda"))
    assert flops_per_token(kda, footprint(kda), 10**6) == flops_per_token(kda, footprint(kda), 0)
