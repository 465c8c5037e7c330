import math

import pytest
import torch
from torch import Tensor

from perilune.moe.activations import SituGlu, SwiGlu

ACTIVATIONS = [SituGlu(), SituGlu(beta=None, linear_beta=2.0), SituGlu(beta=3.0, linear_beta=None), SituGlu(None, None), SwiGlu()]


def situ_by_the_formula(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    return beta * torch.tanh(gate / beta) / (1 + torch.exp(-gate)) * linear_beta * torch.tanh(up / linear_beta)


def pair(dtype: torch.dtype = torch.float64, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    return (torch.randn(7, 5, dtype=torch.float64) * scale).to(dtype), (torch.randn(7, 5, dtype=torch.float64) * scale).to(dtype)


def test_situ_glu_is_the_published_formula() -> None:
    gate, up = pair()
    torch.testing.assert_close(SituGlu()(gate, up), situ_by_the_formula(gate, up, 4.0, 25.0), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(SituGlu(2.0, 3.0)(gate, up), situ_by_the_formula(gate, up, 2.0, 3.0), rtol=1e-13, atol=1e-13)


def test_beta_none_means_one() -> None:
    gate, up = pair()
    assert torch.equal(SituGlu(beta=None)(gate, up), SituGlu(beta=1.0)(gate, up))


def test_linear_beta_none_leaves_the_up_branch_uncapped() -> None:
    gate, up = pair(scale=1.0)
    torch.testing.assert_close(SituGlu(linear_beta=None)(gate, up), SituGlu(linear_beta=1e6)(gate, up), rtol=1e-9, atol=1e-9)
    assert SituGlu(linear_beta=None)(torch.tensor([50.0]), torch.tensor([1000.0])).item() == pytest.approx(4000.0)


def test_situ_glu_never_exceeds_the_product_of_its_betas() -> None:
    extreme = torch.tensor([-1e30, -100.0, -1.0, 0.0, 1.0, 100.0, 1e30])
    gate, up = (grid.reshape(-1) for grid in torch.meshgrid(extreme, extreme, indexing="ij"))
    out = SituGlu()(gate, up)
    assert out.isfinite().all() and out.abs().max() <= 100.0 * (1 + 1e-6)


def test_situ_glu_tends_to_swiglu_as_its_betas_grow() -> None:
    gate, up = pair()
    torch.testing.assert_close(SituGlu(1e5, 1e5)(gate, up), SwiGlu()(gate, up), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(SwiGlu()(gate, up), torch.nn.functional.silu(gate) * up, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_gradients_are_those_of_finite_differences(activation: SituGlu | SwiGlu) -> None:
    gate, up = (side.requires_grad_() for side in pair())
    assert torch.autograd.gradcheck(activation, (gate, up))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_gradients_by_hand_return_the_value_too_and_destroy_nothing(activation: SituGlu | SwiGlu) -> None:
    gate, up = pair()
    factors = activation.factors(gate, up)
    before = [tensor.clone() for tensor in (gate, up, *factors)]
    value, _, _ = activation.gradients(gate, up, factors, torch.ones_like(gate))
    torch.testing.assert_close(value, activation(gate, up))
    assert all(torch.equal(old, new) for old, new in zip(before, (gate, up, *factors), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    gate, up = pair(dtype)
    out = SituGlu()(gate, up)
    assert out.dtype == dtype
    assert torch.equal(out, SituGlu()(gate.float(), up.float()).to(dtype))


def test_the_halves_of_one_tensor_need_no_copy() -> None:
    both = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    gate, up = both.chunk(2, dim=1)
    SituGlu()(gate, up).sum().backward()
    assert both.grad is not None
    copy = both.detach().clone().requires_grad_()
    situ_by_the_formula(copy[:, :5], copy[:, 5:], 4.0, 25.0).sum().backward()
    torch.testing.assert_close(both.grad, copy.grad)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3, 2\)"):
        SituGlu()(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="float64"):
        SwiGlu()(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="beta"):
        SituGlu(beta=0.0)
    with pytest.raises(ValueError, match="linear_beta"):
        SituGlu(linear_beta=math.nan)
