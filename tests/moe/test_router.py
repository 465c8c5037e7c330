import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perilune.moe.router import route, route_logits, route_replayed, router_logits


def route_one_token_at_a_time(
    hidden: Tensor, weight: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling: float
) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """The slow twin: plain Python floats, one token after the other. Also returns the cutoffs (NaN if all experts are chosen)."""
    experts, weights, cutoffs = [], [], []
    for token in hidden.double().tolist():
        scores = [1 / (1 + math.exp(-sum(a * b for a, b in zip(token, row, strict=True)))) for row in weight.double().tolist()]
        biased = [score + offset for score, offset in zip(scores, bias.double().tolist(), strict=True)]
        ranked = sorted(range(len(biased)), key=lambda expert: -biased[expert])
        chosen = ranked[:top_k]
        total = sum(scores[expert] for expert in chosen) + 1e-20 if renormalize else 1.0
        experts.append(chosen)
        weights.append([scores[expert] / total * scaling for expert in chosen])
        cutoffs.append(biased[ranked[top_k]] if top_k < len(ranked) else math.nan)
    return experts, weights, cutoffs


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 9),
    num_experts=st.integers(2, 12),
    renormalize=st.booleans(),
    scaling=st.sampled_from([1.0, 2.446]),
    data=st.data(),
)
def test_route_agrees_with_its_slow_twin(
    seed: int, tokens: int, num_experts: int, renormalize: bool, scaling: float, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, num_experts - 1))
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(num_experts, 6, generator=generator, dtype=torch.float64)
    bias = torch.randn(num_experts, generator=generator)
    routing = route(hidden, weight, bias, top_k, renormalize=renormalize, scaling=scaling, with_cutoff=True)
    experts, weights, cutoffs = route_one_token_at_a_time(hidden, weight, bias, top_k, renormalize, scaling)
    assert routing.experts.tolist() == experts
    assert routing.experts.dtype == torch.int64
    torch.testing.assert_close(routing.weights, torch.tensor(weights, dtype=torch.float64).view(tokens, top_k))
    assert routing.cutoff is not None
    torch.testing.assert_close(routing.cutoff, torch.tensor(cutoffs, dtype=torch.float64))


def test_the_bias_moves_the_choice_but_not_the_weight() -> None:
    hidden, weight = torch.randn(50, 8), torch.randn(6, 8)
    bias = torch.zeros(6)
    bias[4] = 10.0
    routing = route(hidden, weight, bias, 2, renormalize=False)
    assert (routing.experts[:, 0] == 4).all()
    assert torch.equal(routing.weights, routing.scores.gather(1, routing.experts))
    assert routing.weights.max() <= 1.0


def test_renormalised_weights_sum_to_the_scaling() -> None:
    routing = route(torch.randn(50, 8), torch.randn(6, 8), torch.zeros(6), 3, scaling=2.446)
    torch.testing.assert_close(routing.weights.sum(1), torch.full((50,), 2.446))


def test_scores_that_underflow_to_zero_give_zero_weights_instead_of_nan() -> None:
    routing = route(torch.full((1, 1), -1000.0), torch.ones(4, 1), torch.zeros(4), 2)
    assert torch.equal(routing.weights, torch.zeros(1, 2))


def test_the_cutoff_is_the_first_biased_score_left_out() -> None:
    bias = torch.randn(10)
    routing = route(torch.randn(40, 8), torch.randn(10, 8), bias, 3, with_cutoff=True)
    biased = routing.scores + bias
    assert torch.equal(routing.cutoff, biased.sort(1, descending=True).values[:, 3])
    assert ((biased > routing.cutoff[:, None]).sum(1) == 3).all()
    assert route(torch.randn(4, 8), torch.randn(10, 8), bias, 3).cutoff is None


def test_a_bf16_model_is_routed_in_fp32() -> None:
    hidden, weight, bias = torch.randn(200, 64).bfloat16(), torch.randn(32, 64).bfloat16(), torch.randn(32)
    routing = route(hidden, weight, bias, 4)
    wide = route(hidden.float(), weight.float(), bias, 4)
    assert routing.scores.dtype == routing.weights.dtype == torch.float32
    assert torch.equal(routing.experts, wide.experts) and torch.equal(routing.weights, wide.weights)


def test_autocast_does_not_reach_the_router() -> None:
    hidden, weight = torch.randn(20, 64), torch.randn(32, 64)
    expected = router_logits(hidden, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router_logits(hidden, weight), expected)


def test_a_bf16_bias_would_change_the_choice_and_is_refused() -> None:
    hidden, weight, bias = torch.randn(400, 64), torch.randn(64, 64) / 64, 8 + torch.randn(64) / 64
    rounded = bias.bfloat16()
    exact = route(hidden, weight, bias, 8).experts.sort(1).values
    assert (exact != route(hidden, weight, rounded.float(), 8).experts.sort(1).values).any(1).float().mean() > 0.5
    with pytest.raises(ValueError, match="float32"):
        route(hidden, weight, rounded, 8)


def test_a_nan_token_leaves_its_neighbours_alone() -> None:
    hidden, weight, bias = torch.randn(5, 8), torch.randn(6, 8), torch.zeros(6)
    clean = route(hidden, weight, bias, 2)
    hidden[2] = math.nan
    routing = route(hidden, weight, bias, 2)
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(routing.experts[others], clean.experts[others]) and torch.equal(routing.weights[others], clean.weights[others])
    assert ((routing.experts >= 0) & (routing.experts < 6)).all()


def test_weights_are_differentiable_in_hidden_and_weight_but_not_in_the_bias() -> None:
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, requires_grad=True)
    assert torch.autograd.gradcheck(lambda h, w: route(h, w, bias.detach(), 3).weights, (hidden, weight))
    route(hidden, weight, bias, 3).weights.square().sum().backward()
    assert bias.grad is None and weight.grad is not None


def test_a_replayed_routing_has_the_weights_and_gradients_of_the_original() -> None:
    hidden, weight, bias = torch.randn(30, 8), torch.randn(12, 8), torch.randn(12)
    first, second = (weight.clone().requires_grad_() for _ in range(2))
    original = route(hidden, first, bias, 4, scaling=1.5)
    replayed = route_replayed(hidden, second, original.experts, scaling=1.5)
    assert torch.equal(replayed.experts, original.experts) and torch.equal(replayed.weights, original.weights)
    assert torch.equal(replayed.scores, original.scores) and replayed.cutoff is None
    original.weights.square().sum().backward()
    replayed.weights.square().sum().backward()
    assert torch.equal(first.grad, second.grad)


def test_a_replayed_routing_keeps_ids_that_the_router_would_not_choose() -> None:
    hidden, weight = torch.randn(30, 8), torch.randn(12, 8)
    recorded = torch.rand(30, 12).topk(3).indices.int()
    replayed = route_replayed(hidden, weight, recorded, renormalize=False)
    assert torch.equal(replayed.experts, recorded.long())
    torch.testing.assert_close(replayed.weights, torch.sigmoid(hidden @ weight.T).gather(1, recorded.long()))


def test_bad_arguments_are_named() -> None:
    hidden, weight, bias = torch.zeros(3, 8), torch.zeros(6, 8), torch.zeros(6)
    with pytest.raises(ValueError, match=r"\(3, 7\)"):
        route(hidden[:, :7], weight, bias, 2)
    with pytest.raises(ValueError, match="selection_bias"):
        route(hidden, weight, bias[:5], 2)
    with pytest.raises(ValueError, match="top_k"):
        route(hidden, weight, bias, 7)
    with pytest.raises(ValueError, match="top_k"):
        route(hidden, weight, bias, 0)
    with pytest.raises(ValueError, match="with_cutoff"):
        route(hidden, weight, bias, 6, with_cutoff=True)
    with pytest.raises(ValueError, match="router_logits"):
        route_logits(torch.zeros(3, 6, dtype=torch.bfloat16), bias, 2)
    with pytest.raises(ValueError, match=r"0\.\.5"):
        route_replayed(hidden, weight, torch.full((3, 2), 6))
    with pytest.raises(ValueError, match=r"0\.\.5"):
        route_replayed(hidden, weight, torch.full((3, 2), -1))
    with pytest.raises(ValueError, match="shape"):
        route_replayed(hidden, weight, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64"):
        route_replayed(hidden, weight, torch.zeros(3, 2))
