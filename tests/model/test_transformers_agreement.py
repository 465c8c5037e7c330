"""Random small Kimi Linear models, saved by us and loaded by transformers' own implementation: the same logits, the same gradients."""

import random

import pytest
import torch
import torch.nn.functional as F

from perilune.model.batch import SequenceLayout
from perilune.model.config import ModelConfig
from perilune.model.decoder import Decoder
from perilune.model.hub import load_model, save_model
from tests.model.tiny_models import random_ids, random_model

transformers = pytest.importorskip("transformers")

LENGTHS = (70, 5)  # past transformers' chunk of 64, and short


def random_config(seed: int) -> ModelConfig:
    """Other dimensions, layers, expert counts and router settings for every seed."""
    rng = random.Random(seed)
    attention = [rng.choice(["kda", "mla"]) for _ in range(rng.randint(1, 3))] + ["kda", "mla"]
    rng.shuffle(attention)
    experts = rng.randint(4, 9)
    return ModelConfig(
        vocab_size=40, hidden_size=rng.choice([24, 32, 40]), attention=tuple(attention), short_conv_kernel_size=rng.choice([3, 4]),
        kda_num_heads=rng.randint(1, 3), kda_head_dim=rng.choice([8, 12, 16]), num_attention_heads=rng.randint(1, 4),
        kv_lora_rank=rng.choice([8, 12]), qk_nope_head_dim=rng.choice([6, 8]), qk_rope_head_dim=rng.choice([2, 4]),
        v_head_dim=rng.choice([5, 8]), intermediate_size=rng.choice([32, 48]), first_k_dense=rng.randint(0, 2), num_experts=experts,
        num_experts_per_token=rng.randint(1, experts // 2), num_shared_experts=rng.randint(1, 2),
        moe_intermediate_size=rng.choice([8, 16]), routed_scaling_factor=rng.choice([1.0, 2.446]), renormalize=rng.random() < 0.7,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[(3, True), (20, True), (19, False)], ids=lambda p: f"seed {p[0]}, router bias {p[1]}")
def pair(request, tmp_path_factory):
    """Our model and transformers', with the same weights by way of a Hub directory."""
    seed, with_bias = request.param
    model = random_model(random_config(seed), torch.float32, seed)
    if not with_bias:
        for buffer in model.buffers():
            buffer.zero_()
    directory = tmp_path_factory.mktemp("hub")
    save_model(model, directory)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    other, loading = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert type(other).__name__ == "KimiLinearForCausalLM"
    assert not any(loading.values()), loading
    return load_model(directory), other


def sequences(model: Decoder) -> list[torch.Tensor]:
    # Without the special tokens: transformers gives the padding token's embedding no gradient.
    return [3 + random_ids(n, model.config.vocab_size - 3, seed=n) for n in LENGTHS]


def under_their_names(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our gradients by transformers' parameter names: one convolution for q, k and v, the forget gate and experts in modules."""
    renamed = {}
    for name, gradient in gradients.items():
        name = name if name.startswith("lm_head") else f"model.{name}"
        head, _, last = name.rpartition("self_attn.")
        if last in ("q_conv", "k_conv", "v_conv"):
            if last == "q_conv":
                taps = [gradients[f"{head}self_attn.{x}_conv".removeprefix("model.")] for x in "qkv"]
                renamed[f"{head}self_attn.conv1d.weight"] = torch.cat(taps).unsqueeze(1)
            continue
        if last in ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight"):
            name = f"{head}self_attn.forget_gate.{last}"
            gradient = gradient.view(1, 1, -1, 1) if last == "A_log" else gradient
        name = name.replace("mlp.experts_gate_up", "mlp.experts.gate_up_proj").replace("mlp.experts_down", "mlp.experts.down_proj")
        renamed[name] = gradient
    return renamed


@torch.no_grad()
def test_logits_are_equal_for_ragged_batches_here_and_single_sequences_there(pair):
    ours, theirs = pair
    ids = sequences(ours)
    logits = ours(torch.cat(ids), SequenceLayout(LENGTHS)).split(LENGTHS)
    for sequence, mine in zip(ids, logits, strict=True):
        reference = theirs(sequence[None]).logits[0]
        assert reference.std() > 0.1
        assert (mine - reference).abs().max() < 1e-4


def test_the_gradient_of_every_parameter_is_equal(pair):
    ours, theirs = pair
    ids = sequences(ours)
    ours.zero_grad()
    theirs.zero_grad()
    losses = []
    for sequence, mine in zip(ids, ours(torch.cat(ids), SequenceLayout(LENGTHS)).split(LENGTHS), strict=True):
        losses.append(F.cross_entropy(mine[:-1], sequence[1:], reduction="sum"))
        F.cross_entropy(theirs(sequence[None]).logits[0, :-1], sequence[1:], reduction="sum").backward()
    torch.stack(losses).sum().backward()
    mine = under_their_names({name: parameter.grad for name, parameter in ours.named_parameters()})
    reference = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert mine.keys() == reference.keys()
    for name, gradient in reference.items():
        assert mine[name].shape == gradient.shape, name
        assert gradient.norm() > 1e-3, name
        assert (mine[name] - gradient).norm() < 5e-5 * gradient.norm(), name
