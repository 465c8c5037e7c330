"""What each parameter is to the optimizer."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from perilune.model.batch import SequenceLayout
from perilune.model.config import ModelConfig
from perilune.model.decoder import Decoder
from perilune.train.optimizer import OptimizerSettings, ParameterRole, build_optimizers
from perilune.train.roles import parameter_roles
from tests.model.tiny_models import k3_config, kimi_linear_config, random_ids, random_model

both = pytest.mark.parametrize("config", [k3_config(), kimi_linear_config()], ids=["k3", "kimi-linear"])


def roles_of(config: ModelConfig) -> dict[str, ParameterRole]:
    with torch.device("meta"):
        return parameter_roles(Decoder(config))


@both
def test_every_trainable_parameter_has_a_role_and_nothing_else(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Decoder(config)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(parameter_roles(model)) == trainable
    assert not [name for name in trainable if "selection_bias" in name]


def test_the_read_of_the_empty_bank_is_not_trained() -> None:
    roles = roles_of(k3_config())
    assert not [name for name in roles if name.startswith("layers.0.self_attention_res")]
    assert "layers.1.self_attention_res.proj" in roles


@both
def test_projections_whose_rows_are_heads_are_split_by_heads_and_no_others(config: ModelConfig) -> None:
    split = {"kda": ("q_proj", "k_proj", "v_proj"), "mla": ("q_proj", "q_b_proj", "kv_b_proj")}
    heads = {"kda": config.kda_num_heads, "mla": config.num_attention_heads}
    for name, role in roles_of(config).items():
        parts = name.split(".")
        kind = config.attention[int(parts[1])] if parts[0] == "layers" and parts[2] == "self_attn" else None
        expected = heads[kind] if kind is not None and parts[3] in split[kind] else None
        assert role.heads == expected, name


def test_the_split_projections_are_there() -> None:
    k3, linear = roles_of(k3_config()), roles_of(kimi_linear_config())
    for name in ("q_proj", "k_proj", "v_proj"):
        assert k3[f"layers.0.self_attn.{name}.weight"] == ParameterRole("matrix", heads=2)
        assert linear[f"layers.0.self_attn.{name}.weight"] == ParameterRole("matrix", heads=2)
    for name in ("q_b_proj", "kv_b_proj"):
        assert k3[f"layers.1.self_attn.{name}.weight"] == ParameterRole("matrix", heads=3)
    for name in ("q_proj", "kv_b_proj"):
        assert linear[f"layers.2.self_attn.{name}.weight"] == ParameterRole("matrix", heads=3)
    for name in ("layers.0.self_attn.o_proj", "layers.0.self_attn.g_proj", "layers.1.self_attn.o_proj", "layers.1.self_attn.g_proj"):
        assert k3[f"{name}.weight"] == ParameterRole("matrix")


@both
def test_norms_pseudo_queries_and_decay_parameters_do_not_decay_and_all_else_does(config: ModelConfig) -> None:
    for name, role in roles_of(config).items():
        undecayed = "norm" in name or name.endswith(("_res.proj", "A_log", "dt_bias"))
        assert role.weight_decay is not undecayed, name
        assert (role.kind == "vector") is (undecayed or "_conv" in name), name


@both
def test_embeddings_are_embeddings_and_experts_are_stacks_of_whole_matrices(config: ModelConfig) -> None:
    roles = roles_of(config)
    assert {name for name, role in roles.items() if role.kind == "embedding"} == {"embed_tokens.weight", "lm_head.weight"}
    experts = [role for name, role in roles.items() if ".experts_" in name]
    assert len(experts) == 2 * len(config.moe_layers) and set(experts) == {ParameterRole("matrix")}


@both
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_one_step_changes_every_trainable_parameter_and_no_other(config: ModelConfig, kind: str) -> None:
    model = random_model(config, torch.float32)  # a fresh one has zeros whose partners get no gradient
    roles = parameter_roles(model)
    settings = OptimizerSettings.model_validate({"kind": kind, "weight_decay": 0.0})
    optimizers = build_optimizers(model.named_parameters(), roles, settings)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = random_ids(40)
    F.cross_entropy(model(ids, SequenceLayout((25, 15))), ids.roll(-1)).backward()
    optimizers.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(roles)


@both
def test_the_roles_fit_the_shapes_they_name(config: ModelConfig) -> None:
    model = random_model(config, torch.float32)
    roles = parameter_roles(model)
    wrong = {name: replace(role, heads=7) for name, role in roles.items() if role.heads}
    build_optimizers(model.named_parameters(), roles, OptimizerSettings())
    with pytest.raises(ValueError, match="7 heads do not divide"):
        build_optimizers(model.named_parameters(), roles | wrong, OptimizerSettings())
