"""MLA against a loop over tokens and heads, and its three ways of attending against each other."""

import pytest
import torch

from perilune.model import batch
from perilune.model.batch import SequenceLayout, attention_buckets
from perilune.model.gated_mla import GatedMLA
from perilune.model.state import SequenceState
from tests.model.tiny_models import k3_config, kimi_linear_config, random_model

CONFIGS = (k3_config(attention=("mla", "kda")), kimi_linear_config(attention=("mla", "kda")))
IDS = ("k3", "kimi-linear")
LENGTHS = (7, 0, 1, 12, 1, 3)


@pytest.fixture(params=[16384, 0], ids=["one bucket", "many buckets"])
def _padding(request, monkeypatch):
    monkeypatch.setattr(batch, "_FREE_PADDING", request.param)


def layer_of(config) -> GatedMLA:
    return random_model(config).layers[0].self_attn


def rms(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def by_equations(layer: GatedMLA, x: torch.Tensor) -> torch.Tensor:
    """One sequence [tokens, hidden], one query and head at a time, keys and values formed for every head."""
    nope, rope, rank = layer.nope, layer.rope, layer.rank
    if layer.q_lora_rank is None:
        query = x @ layer.q_proj.weight.T
    else:
        query = rms(x @ layer.q_a_proj.weight.T, layer.q_a_layernorm) @ layer.q_b_proj.weight.T
    compressed = x @ layer.kv_a_proj_with_mqa.weight.T
    latent, shared_key = rms(compressed[:, :rank], layer.kv_a_layernorm), compressed[:, rank:]
    out = []
    for t in range(len(x)):
        heads = []
        for h in range(layer.heads):
            q = query[t, h * (nope + rope) : (h + 1) * (nope + rope)]
            block = layer.kv_b_proj.weight[h * (nope + layer.value_dim) : (h + 1) * (nope + layer.value_dim)]
            keys = torch.cat((latent[: t + 1] @ block[:nope].T, shared_key[: t + 1]), -1)
            weights = torch.softmax(keys @ q * (nope + rope) ** -0.5, 0)
            heads.append(weights @ (latent[: t + 1] @ block[nope:].T))
        out.append(torch.cat(heads))
    attended = torch.stack(out)
    if layer.output_gate:
        attended = attended * torch.sigmoid(x @ layer.g_proj.weight.T)
    return attended @ layer.o_proj.weight.T


@torch.inference_mode()
@pytest.mark.usefixtures("_padding")
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize("lengths", [LENGTHS, (5, 5), (1, 1, 1)], ids=str)
def test_packed_and_cached_prefill_equal_the_equations_of_each_sequence(config, lengths):
    layer = layer_of(config)
    x = torch.randn(sum(lengths), 16, dtype=torch.float64)
    state = SequenceState(config, 8, 16, torch.float64)
    slots = tuple(range(7, 7 - len(lengths), -1))
    whole = layer(x, SequenceLayout(lengths), None)
    cached = layer(x, SequenceLayout(lengths, (0,) * len(lengths), slots), state)
    for part, held, inputs in zip(whole.split(lengths), cached.split(lengths), x.split(lengths), strict=True):
        if len(inputs):
            expected = by_equations(layer, inputs)
            assert (part - expected).abs().max() < 1e-12
            assert (held - expected).abs().max() < 1e-12


@torch.inference_mode()
@pytest.mark.usefixtures("_padding")
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_decoding_on_the_latents_equals_the_packed_forward(config, monkeypatch):
    layer = layer_of(config)
    lengths, total = (4, 9, 1), 14
    x = [torch.randn(total, 16, dtype=torch.float64) for _ in lengths]
    expected = [layer(s, SequenceLayout((total,)), None) for s in x]
    state = SequenceState(config, 4, 16, torch.float64)
    slots = (3, 1, 0)
    layer(torch.cat([s[:n] for s, n in zip(x, lengths, strict=True)]), SequenceLayout(lengths, (0, 0, 0), slots), state)
    done = list(lengths)
    monkeypatch.setattr(layer, "_expanded", None)  # single queries must not form keys and values
    for _ in range(5):
        y = layer(torch.stack([s[n] for s, n in zip(x, done, strict=True)]), SequenceLayout((1, 1, 1), tuple(done), slots), state)
        for row, (reference, n) in enumerate(zip(expected, done, strict=True)):
            assert (y[row] - reference[n]).abs().max() < 1e-12
        done = [n + 1 for n in done]


@torch.inference_mode()
@pytest.mark.usefixtures("_padding")
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_new_chunks_and_single_tokens_mix_in_one_batch_over_long_and_short_contexts(config):
    layer = layer_of(config)
    total = 16
    x = [torch.randn(total, 16, dtype=torch.float64) for _ in range(4)]
    state = SequenceState(config, 4, total, torch.float64)
    slots, contexts, lengths = (2, 0, 3, 1), (10, 3, 0, 15), (1, 6, 16, 1)
    layer(torch.cat([s[:c] for s, c in zip(x, contexts, strict=True)]), SequenceLayout(contexts, (0,) * 4, slots), state)
    new = [s[c : c + n] for s, c, n in zip(x, contexts, lengths, strict=True)]
    y = layer(torch.cat(new), SequenceLayout(lengths, contexts, slots), state)
    for part, s, c, n in zip(y.split(lengths), x, contexts, lengths, strict=True):
        assert (part - layer(s, SequenceLayout((total,)), None)[c : c + n]).abs().max() < 1e-12


def test_the_many_buckets_of_these_tests_are_many(monkeypatch):
    monkeypatch.setattr(batch, "_FREE_PADDING", 0)
    assert len(attention_buckets(SequenceLayout(LENGTHS))) >= 3


@torch.inference_mode()
def test_the_cache_holds_the_normalised_latent_and_the_raw_shared_key():
    config = CONFIGS[0]
    layer = layer_of(config)
    x = torch.randn(3, 16, dtype=torch.float64)
    state = SequenceState(config, 2, 8, torch.float64)
    layer(x, SequenceLayout((3,), (0,), (1,)), state)
    compressed = x @ layer.kv_a_proj_with_mqa.weight.T
    expected = torch.cat((rms(compressed[:, :8], layer.kv_a_layernorm), compressed[:, 8:]), -1)
    assert (state.latents[0][1, :3] - expected).abs().max() < 1e-12
    assert not state.latents[0][1, 3:].any()
    assert not state.latents[0][0].any()


@torch.inference_mode()
@pytest.mark.parametrize("queries", [1, 3])
def test_nan_left_in_a_slot_does_not_reach_its_next_owner_once_cleared(queries):
    config = CONFIGS[0]
    layer = layer_of(config)
    x, other = torch.randn(queries, 16, dtype=torch.float64), torch.randn(9, 16, dtype=torch.float64)
    state = SequenceState(config, 2, 16, torch.float64)
    layer(other, SequenceLayout((9,), (0,), (1,)), state)
    state.latents[0][0] = float("nan")
    state.clear([0])
    # Slot 1 has a longer context, so slot 0 is padded to it and its unused rows are read, masked.
    y = layer(torch.cat((x, other[:1])), SequenceLayout((queries, 1), (0, 9), (0, 1)), state)
    assert (y[:queries] - by_equations(layer, x)).abs().max() < 1e-12
    assert len(attention_buckets(SequenceLayout((queries, 1), (0, 9)))) == 1


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_no_tokens_are_fine_with_and_without_a_state(lengths):
    config = CONFIGS[0]
    layer = layer_of(config)
    state = SequenceState(config, 2, 8, torch.float64)
    x = torch.zeros(0, 16, dtype=torch.float64)
    assert layer(x, SequenceLayout(lengths), None).shape == (0, 16)
    assert layer(x, SequenceLayout(lengths, (0,) * len(lengths), tuple(range(len(lengths)))), state).shape == (0, 16)


def test_gradients_of_ragged_buckets_equal_those_of_separate_sequences(monkeypatch):
    monkeypatch.setattr(batch, "_FREE_PADDING", 0)
    layer = layer_of(CONFIGS[0])
    x = torch.randn(sum(LENGTHS), 16, dtype=torch.float64, requires_grad=True)
    parameters = (x, *layer.parameters())
    weights = torch.randn(sum(LENGTHS), 16, dtype=torch.float64)
    together = torch.autograd.grad((layer(x, SequenceLayout(LENGTHS), None) * weights).sum(), parameters)
    apart = sum(
        (layer(part, SequenceLayout((len(part),)), None) * w).sum()
        for part, w in zip(x.split(LENGTHS), weights.split(LENGTHS), strict=True)
        if len(part)
    )
    for a, b in zip(together, torch.autograd.grad(apart, parameters), strict=True):
        assert (a - b).abs().max() < 1e-11


def test_a_state_takes_up_no_graph_outside_inference_mode():
    config = CONFIGS[0]
    layer = layer_of(config)
    state = SequenceState(config, 1, 8, torch.float64)
    layer(torch.randn(3, 16, dtype=torch.float64), SequenceLayout((3,), (0,), (0,)), state)
    assert not state.latents[0].requires_grad
