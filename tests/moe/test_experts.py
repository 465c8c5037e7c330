import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.moe.activations import GatedActivation, SituGlu, SwiGlu
from perilune.moe.experts import dense_experts, grouped_experts

# Tight enough that tanh caps matter at the scale of these random projections.
SITU = SituGlu(1.0, 2.0)


class Problem(NamedTuple):
    x: Tensor
    expert_ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor


def problem(
    tokens: int,
    num_experts: int = 6,
    top_k: int = 2,
    hidden: int = 8,
    width: int = 12,
    dtype: torch.dtype = torch.float64,
    skew: float = 0.0,
) -> Problem:
    """Random experts and tokens; `skew` prefers some experts over others, up to leaving some without a token."""
    preference = torch.randn(tokens, num_experts) + skew * torch.randn(num_experts)
    return Problem(
        torch.randn(tokens, hidden, dtype=torch.float64).to(dtype),
        preference.topk(top_k).indices,
        torch.rand(tokens, top_k, dtype=torch.float64 if dtype == torch.float64 else torch.float32),
        (torch.randn(num_experts, 2 * width, hidden, dtype=torch.float64) / math.sqrt(hidden)).to(dtype),
        (torch.randn(num_experts, hidden, width, dtype=torch.float64) / math.sqrt(width)).to(dtype),
    )


def tensors_with_gradients(given: Problem) -> Problem:
    return Problem(*(tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in given))


def gradients(of: Problem, loss: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, (of.x, of.weights, of.gate_up, of.down))


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 20),
    num_experts=st.integers(1, 7),
    sizes=st.sampled_from([(8, 12), (7, 5), (4, 6), (16, 4)]),
    skew=st.sampled_from([0.0, 5.0]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    activation=st.sampled_from([SITU, SwiGlu()]),
    data=st.data(),
)
def test_grouped_experts_agree_with_their_slow_twin(
    seed: int,
    tokens: int,
    num_experts: int,
    sizes: tuple[int, int],
    skew: float,
    dtype: torch.dtype,
    activation: GatedActivation,
    data: st.DataObject,
) -> None:
    torch.manual_seed(seed)
    top_k = data.draw(st.integers(1, num_experts))
    drawn = problem(tokens, num_experts, top_k, *sizes, dtype=dtype, skew=skew)
    fast, slow = tensors_with_gradients(drawn), tensors_with_gradients(drawn)
    out, expected = grouped_experts(*fast, activation), dense_experts(*slow, activation)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    direction = torch.randn_like(out)
    for got, wanted in zip(gradients(fast, (out * direction).sum()), gradients(slow, (expected * direction).sum()), strict=True):
        torch.testing.assert_close(got, wanted, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("activation", [SITU, SituGlu(None, None), SwiGlu()], ids=str)
def test_gradients_are_those_of_finite_differences(activation: GatedActivation) -> None:
    x, ids, weights, gate_up, down = tensors_with_gradients(problem(5, num_experts=4, hidden=3, width=2, skew=2.0))
    assert torch.autograd.gradcheck(
        lambda *tensors: grouped_experts(tensors[0], ids, *tensors[1:], activation), (x, weights, gate_up, down)
    )


@pytest.mark.parametrize("skew", [0.0, 8.0], ids=["even", "skewed"])
def test_real_sizes_agree_with_the_slow_twin(skew: float) -> None:
    given = problem(500, num_experts=16, hidden=96, width=48, dtype=torch.float32, skew=skew)
    torch.testing.assert_close(grouped_experts(*given, SituGlu()), dense_experts(*given, SituGlu()), rtol=1e-4, atol=1e-5)


def test_bf16_is_summed_in_fp32() -> None:
    given = problem(64, num_experts=8, top_k=8, hidden=32, width=16, dtype=torch.bfloat16)
    out = grouped_experts(*given, SITU)
    exact = dense_experts(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in given), SITU)
    assert out.dtype == torch.bfloat16
    # Eight outputs and the sum are each rounded once to 8 bits; summing in bf16 would add seven more roundings.
    assert (out.double() - exact).square().mean().sqrt() < 0.004 * exact.square().mean().sqrt()


def test_bf16_gradients_come_back_in_the_dtypes_of_their_tensors() -> None:
    given = tensors_with_gradients(problem(20, dtype=torch.bfloat16))
    grads = gradients(given, grouped_experts(*given, SITU).float().square().sum())
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    wide = tensors_with_gradients(Problem(*(tensor.detach().double() if tensor.is_floating_point() else tensor for tensor in given)))
    for got, wanted in zip(grads, gradients(wide, grouped_experts(*wide, SITU).square().sum()), strict=True):
        assert (got.double() - wanted).norm() < 0.03 * wanted.norm()


def test_a_token_depends_on_no_other() -> None:
    given = problem(40, skew=1.0)
    together = grouped_experts(*given, SITU)
    for token in (0, 17, 39):
        alone = grouped_experts(given.x[[token]], given.expert_ids[[token]], given.weights[[token]], given.gate_up, given.down, SITU)
        torch.testing.assert_close(together[[token]], alone, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_nan_token_leaves_its_neighbours_alone(dtype: torch.dtype) -> None:
    given = problem(20, dtype=dtype)
    given.x[7] = math.nan
    out = grouped_experts(*given, SITU)
    assert out[7].isnan().all() and out[torch.arange(20) != 7].isfinite().all()


def test_experts_without_tokens_get_zero_gradients() -> None:
    for dtype in (torch.float64, torch.float32):
        given = tensors_with_gradients(problem(10, num_experts=4, dtype=dtype))
        given.expert_ids.fill_(1)
        _, _, d_gate_up, d_down = gradients(given, grouped_experts(*given, SITU).sum())
        assert not d_gate_up[[0, 2, 3]].any() and not d_down[[0, 2, 3]].any()
        assert d_gate_up[1].any() and d_down[1].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zero_tokens_give_an_empty_result_and_zero_gradients(dtype: torch.dtype) -> None:
    given = tensors_with_gradients(problem(0, dtype=dtype))
    out = grouped_experts(*given, SITU)
    assert out.shape == (0, 8)
    assert not any(grad.any() for grad in gradients(given, out.sum()))


def test_inference_is_the_same_computation() -> None:
    given = tensors_with_gradients(problem(30))
    with torch.no_grad():
        without = grouped_experts(*given, SITU)
    assert not without.requires_grad
    assert torch.equal(grouped_experts(*given, SITU), without)


def test_frozen_experts_still_pass_gradients_to_tokens_and_weights() -> None:
    drawn = problem(12)
    given = drawn._replace(x=drawn.x.clone().requires_grad_(), weights=drawn.weights.clone().requires_grad_())
    full = tensors_with_gradients(drawn)
    d_x, d_weights = torch.autograd.grad(grouped_experts(*given, SITU).square().sum(), (given.x, given.weights))
    expected = gradients(full, grouped_experts(*full, SITU).square().sum())
    assert torch.equal(d_x, expected[0]) and torch.equal(d_weights, expected[1])


def test_parameters_may_be_views_and_the_gradient_expanded() -> None:
    given = problem(12)
    transposed = given._replace(gate_up=given.gate_up.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_())
    plain = given._replace(gate_up=given.gate_up.clone().requires_grad_())
    for case in (transposed, plain):
        grouped_experts(*case, SITU).sum().backward()
    torch.testing.assert_close(transposed.gate_up.grad, plain.gate_up.grad)


def test_bad_arguments_are_named() -> None:
    x, ids, weights, gate_up, down = problem(5)
    with pytest.raises(ValueError, match="gate_up"):
        grouped_experts(x, ids, weights, gate_up[:, :-1], down, SITU)
    with pytest.raises(ValueError, match=r"\[tokens, 8\]"):
        grouped_experts(x[:, :7], ids, weights, gate_up, down, SITU)
    with pytest.raises(ValueError, match=r"\[5 tokens, top_k\]"):
        grouped_experts(x, ids[:4], weights, gate_up, down, SITU)
    with pytest.raises(ValueError, match="int64"):
        grouped_experts(x, ids.int(), weights, gate_up, down, SITU)
    with pytest.raises(ValueError, match="dtype"):
        grouped_experts(x.float(), ids, weights, gate_up, down, SITU)
    for wrong in (6, -1):
        with pytest.raises(ValueError, match=r"0\.\.5"):
            grouped_experts(x, torch.full_like(ids, wrong), weights, gate_up, down, SITU)
