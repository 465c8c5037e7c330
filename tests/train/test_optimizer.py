"""Roles to optimizers, state, and clipping."""

import copy
import io
import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from perilune.errors import UserError
from perilune.train.muon import MatrixParameter, Muon
from perilune.train.optimizer import OptimizerSettings, ParameterRole, build_optimizers, clip_gradients

ROLES = {
    "embedding": ParameterRole("embedding"),
    "query": ParameterRole("matrix", heads=4),
    "output": ParameterRole("matrix"),
    "plain": ParameterRole("matrix", weight_decay=False),
    "norm": ParameterRole("vector", weight_decay=False),
    "conv": ParameterRole("vector"),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(10, 8))
        self.query = nn.Parameter(torch.randn(16, 8))
        self.output = nn.Parameter(torch.randn(8, 16))
        self.plain = nn.Parameter(torch.randn(8, 8))
        self.norm = nn.Parameter(torch.ones(8))
        self.conv = nn.Parameter(torch.randn(8, 1, 4))


def set_gradients(model: Model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_matrices_go_to_per_head_muon_and_the_rest_to_adamw() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    optimizers = build_optimizers(model.named_parameters(), ROLES, OptimizerSettings(learning_rate=0.01))
    decayed = Muon([MatrixParameter(twin.query, 4), MatrixParameter(twin.output)], 0.01, weight_decay=0.1)
    plain = Muon([MatrixParameter(twin.plain)], 0.01, weight_decay=0.0)
    adamw = torch.optim.AdamW(
        [{"params": [twin.embedding, twin.conv], "weight_decay": 0.1}, {"params": [twin.norm], "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for seed in range(3):
        set_gradients(model, seed)
        set_gradients(twin, seed)
        optimizers.step()
        for optimizer in (decayed, plain, adamw):
            optimizer.step()
    for (name, parameter), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, msg=name)


def test_kind_adamw_trains_everything_by_adamw() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    optimizers = build_optimizers(model.named_parameters(), ROLES, OptimizerSettings(kind="adamw", learning_rate=0.01, weight_decay=0.0))
    expected = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(3):
        set_gradients(model, seed)
        set_gradients(twin, seed)
        optimizers.step()
        expected.step()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, other)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_saved_optimizers_continue_to_the_same_bits(kind: str) -> None:
    settings = OptimizerSettings.model_validate({"kind": kind})
    model = Model()
    first = build_optimizers(model.named_parameters(), ROLES, settings)
    for seed in range(2):
        set_gradients(model, seed)
        first.step()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    twin = copy.deepcopy(model)
    second = build_optimizers(twin.named_parameters(), ROLES, settings)
    second.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for seed in range(2, 4):
        for each, optimizers in ((model, first), (twin, second)):
            set_gradients(each, seed)
            optimizers.set_learning_rate(0.5)
            optimizers.step()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_loaded_state_leaves_todays_settings_in_force() -> None:
    model = Model()
    old = build_optimizers(model.named_parameters(), ROLES, OptimizerSettings(kind="adamw", learning_rate=0.01, weight_decay=0.1))
    set_gradients(model, 0)
    old.step()
    twin = copy.deepcopy(model)
    new = build_optimizers(twin.named_parameters(), ROLES, OptimizerSettings(kind="adamw", learning_rate=0.02, weight_decay=0.0))
    new.load_state_dict(old.state_dict())
    new.set_learning_rate(1.0)
    groups = new._parts["adamw"].param_groups
    assert {group["lr"] for group in groups} == {0.02} and {group["weight_decay"] for group in groups} == {0.0}


def test_the_learning_rate_is_a_share_of_the_peak() -> None:
    model = Model()
    before = copy.deepcopy(model)
    optimizers = build_optimizers(model.named_parameters(), ROLES, OptimizerSettings())
    set_gradients(model, 0)
    optimizers.set_learning_rate(0.0)
    optimizers.step()
    for parameter, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(parameter, other)
    optimizers.set_learning_rate(0.25)
    optimizers.set_learning_rate(0.5)  # of the peak, not of the last value
    rates = {group["lr"] for part in optimizers._parts.values() for group in part.param_groups}
    assert rates == {0.5 * 2e-3}


def test_zero_grad_clears_every_gradient() -> None:
    model = Model()
    optimizers = build_optimizers(model.named_parameters(), ROLES, OptimizerSettings())
    set_gradients(model, 0)
    optimizers.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_parameters_need_no_role_and_are_not_trained() -> None:
    model = Model()
    model.query.requires_grad_(False)
    before = model.query.detach().clone()
    roles = {name: role for name, role in ROLES.items() if name != "query"}
    optimizers = build_optimizers(model.named_parameters(), roles, OptimizerSettings())
    set_gradients(model, 0)
    optimizers.step()
    assert torch.equal(model.query, before)


def test_names_and_roles_must_match() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"without a role: \['norm'\]"):
        build_optimizers(model.named_parameters(), {name: role for name, role in ROLES.items() if name != "norm"}, OptimizerSettings())
    with pytest.raises(ValueError, match=r"without a parameter: \['gone'\]"):
        build_optimizers(model.named_parameters(), {**ROLES, "gone": ParameterRole("vector")}, OptimizerSettings())
    with pytest.raises(ValueError, match="heads are for matrices"):
        ParameterRole("vector", heads=2)


def test_state_of_another_kind_or_model_is_refused() -> None:
    model = Model()
    state = build_optimizers(model.named_parameters(), ROLES, OptimizerSettings()).state_dict()
    with pytest.raises(UserError, match="optimizer kind 'muon', not 'adamw'"):
        build_optimizers(model.named_parameters(), ROLES, OptimizerSettings(kind="adamw")).load_state_dict(state)
    smaller = [(name, parameter) for name, parameter in model.named_parameters() if name != "conv"]
    roles = {name: role for name, role in ROLES.items() if name != "conv"}
    with pytest.raises(UserError, match="they differ in conv"):
        build_optimizers(smaller, roles, OptimizerSettings()).load_state_dict(state)
    with pytest.raises(UserError, match="heads"):
        build_optimizers(
            model.named_parameters(), {**ROLES, "query": ParameterRole("matrix", heads=2)}, OptimizerSettings()
        ).load_state_dict(state)


@pytest.mark.parametrize(
    "fields", [{"kind": "sgd"}, {"learning_rate": 0.0}, {"learning_rate": math.inf}, {"momentum": 1.0}, {"lr": 1e-3}, {"betas": [0.9, 1.0]}]
)
def test_settings_out_of_range_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        OptimizerSettings.model_validate(fields)


def gradients(*values: list[float]) -> list[nn.Parameter]:
    parameters = []
    for value in values:
        parameter = nn.Parameter(torch.zeros(len(value)))
        parameter.grad = torch.tensor(value)
        parameters.append(parameter)
    return parameters


def test_clipping_scales_all_gradients_by_the_global_norm() -> None:
    parameters = [*gradients([3.0, 0.0], [4.0]), nn.Parameter(torch.zeros(2))]
    assert clip_gradients(parameters, 1.0) == pytest.approx(5.0)
    assert parameters[0].grad is not None and parameters[1].grad is not None
    torch.testing.assert_close(parameters[0].grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(parameters[1].grad, torch.tensor([0.8]))
    assert parameters[2].grad is None


@pytest.mark.parametrize("max_norm", [5.0, 6.0, None])
def test_gradients_within_the_limit_keep_their_bits(max_norm: float | None) -> None:
    parameters = gradients([3.0], [4.0])
    assert clip_gradients(parameters, max_norm) == 5.0
    assert [parameter.grad.item() for parameter in parameters if parameter.grad is not None] == [3.0, 4.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_norm_that_is_not_finite_is_returned_and_nothing_is_clipped(bad: float) -> None:
    parameters = gradients([bad, bad], [4.0])
    assert not math.isfinite(clip_gradients(parameters, 1.0))
    assert parameters[1].grad is not None and parameters[1].grad.item() == 4.0


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_gradients([nn.Parameter(torch.zeros(2))], 1.0) == 0.0
