import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from perilune.moe.balance_metrics import balance_metrics, expert_loads
from perilune.moe.quantile import Mode, QuantileBalancer, exact_thresholds, histogram_thresholds, sign_update
from perilune.moe.router import Routing, route_logits


def random_routing(tokens: int, bias: Tensor, top_k: int, generator: torch.Generator | None = None) -> Routing:
    logits = torch.randn(tokens, bias.numel(), generator=generator) + torch.linspace(-2, 2, bias.numel())
    return route_logits(logits, bias, top_k, with_cutoff=True)


def observed(balancer: QuantileBalancer, layer: int, routing: Routing, mask: Tensor | None = None) -> None:
    assert routing.cutoff is not None
    balancer.observe(layer, routing.scores, routing.cutoff, mask)


@st.composite
def routers(draw: st.DrawFn) -> tuple[Tensor, int, Tensor]:
    """(margins [tokens, experts], top_k, bias) of a random router: few or many tokens, m·k divisible by n or not."""
    experts = draw(st.integers(2, 12))
    top_k = draw(st.integers(1, experts - 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    bias = torch.randn(experts, generator=generator) * draw(st.sampled_from([0.0, 0.5, 3.0]))
    routing = random_routing(draw(st.integers(1, 80)), bias, top_k, generator)
    assert routing.cutoff is not None
    return routing.cutoff[:, None] - routing.scores, top_k, bias


@given(routers())
def test_the_exact_threshold_leaves_exactly_the_fair_share_below(case: tuple[Tensor, int, Tensor]) -> None:
    margins, top_k, _ = case
    tokens, experts = margins.shape
    assume(bool((margins.sort(0).values.diff(dim=0) > 0).all()))
    below = (margins < exact_thresholds(margins, top_k)).sum(0)
    assert (below == math.ceil(tokens * top_k / experts)).all()


@given(routers(), st.sampled_from([1, 7, 100, 1000]))
def test_the_histogram_agrees_with_the_exact_threshold_within_a_bin(case: tuple[Tensor, int, Tensor], bins: int) -> None:
    margins, top_k, bias = case
    low, high = bias.min() - 1, bias.max() + 1
    width = (high - low) / bins
    index = ((margins - low) / width).long().clamp(0, bins - 1)
    counts = torch.stack([torch.bincount(column, minlength=bins) for column in index.unbind(1)])
    tokens, thresholds = histogram_thresholds(counts.int().unsqueeze(0), top_k, low.view(1), width.view(1))
    assert tokens.tolist() == [margins.shape[0]]
    assert (thresholds[0] - exact_thresholds(margins, top_k)).abs().max() <= width * (1 + 1e-3)


@given(routers())
def test_both_modes_give_the_same_bias_within_two_bins(case: tuple[Tensor, int, Tensor]) -> None:
    margins, top_k, bias = case
    updated = []
    for mode in ("exact", "histogram"):
        balancer = QuantileBalancer(1, bias.numel(), top_k, mode)
        balancer.begin(bias.unsqueeze(0))
        # Only the margin α − s enters, so a cutoff of zero and negated margins are as good as the scores they came from.
        balancer.observe(0, -margins, torch.zeros(margins.shape[0]))
        updated.append(balancer.update(bias.unsqueeze(0)))
    width = (bias.max() - bias.min() + 2) / 1000
    # Each threshold is off by at most one bin, and so is the mean that is subtracted.
    assert (updated[0] - updated[1]).abs().max() <= 2 * width * (1 + 1e-3)


@pytest.mark.parametrize("mode", ["exact", "histogram"])
def test_the_new_bias_balances_the_tokens_it_was_computed_from(mode: Mode) -> None:
    logits = torch.randn(4000, 16) + torch.linspace(-2, 2, 16)
    bias = torch.zeros(1, 16)
    balancer = QuantileBalancer(1, 16, 2, mode)
    violations = []
    for _ in range(9):
        routing = route_logits(logits, bias[0], 2, with_cutoff=True)
        violations.append(balance_metrics(expert_loads(routing.experts, 16)[None]).max_violation[0])
        observed(balancer, 0, routing)
        bias = balancer.update(bias)
    assert violations[0] > 2 and violations[1] < 0.6 and violations[8] < 0.05
    assert bias.mean().abs() < 1e-6


@pytest.mark.parametrize("mode", ["exact", "histogram"])
def test_micro_batches_add_up_to_one_batch(mode: Mode) -> None:
    bias = torch.randn(2, 8)
    whole, parts = QuantileBalancer(2, 8, 3, mode), QuantileBalancer(2, 8, 3, mode)
    for balancer in (whole, parts):
        balancer.begin(bias)
    for layer in range(2):
        routing = random_routing(61, bias[layer], 3)
        observed(whole, layer, routing)
        for rows in (slice(0, 10), slice(10, 10), slice(10, 61)):
            parts.observe(layer, routing.scores[rows], routing.cutoff[rows])
    assert torch.equal(whole.update(bias), parts.update(bias))


@pytest.mark.parametrize("mode", ["exact", "histogram"])
def test_padding_does_not_count(mode: Mode) -> None:
    bias = torch.zeros(1, 8)
    masked, short = QuantileBalancer(1, 8, 3, mode), QuantileBalancer(1, 8, 3, mode)
    routing = random_routing(50, bias[0], 3)
    mask = torch.rand(50) < 0.6
    scores = torch.where(mask[:, None], routing.scores, math.nan)
    masked.observe(0, scores, routing.cutoff, mask)
    short.observe(0, routing.scores[mask], routing.cutoff[mask])
    assert torch.equal(masked.update(bias), short.update(bias))


@pytest.mark.parametrize("mode", ["exact", "histogram"])
def test_a_layer_without_tokens_keeps_its_bias(mode: Mode) -> None:
    bias = torch.randn(3, 8)
    balancer = QuantileBalancer(3, 8, 3, mode)
    balancer.begin(bias)
    observed(balancer, 1, random_routing(50, bias[1], 3))
    balancer.observe(2, torch.zeros(5, 8), torch.zeros(5), torch.zeros(5, dtype=torch.bool))
    updated = balancer.update(bias)
    assert torch.equal(updated[[0, 2]], bias[[0, 2]]) and not torch.equal(updated[1], bias[1])


@pytest.mark.parametrize("mode", ["exact", "histogram"])
def test_an_update_starts_the_next_step_from_nothing(mode: Mode) -> None:
    balancer = QuantileBalancer(1, 8, 3, mode)
    observed(balancer, 0, random_routing(50, torch.zeros(8), 3))
    bias = balancer.update(torch.zeros(1, 8))
    assert torch.equal(balancer.update(bias), bias)
    routing = random_routing(70, bias[0], 3)
    fresh = QuantileBalancer(1, 8, 3, mode)
    fresh.begin(bias)
    for each in (balancer, fresh):
        observed(each, 0, routing)
    assert torch.equal(balancer.update(bias), fresh.update(bias))


def test_the_histogram_follows_the_range_of_the_bias() -> None:
    bias = torch.linspace(-9, 5, 8).unsqueeze(0)
    balancer = QuantileBalancer(1, 8, 3)
    balancer.begin(bias)
    observed(balancer, 0, random_routing(50, bias[0], 3))
    assert balancer.counts.sum() == 50 * 8
    balancer.update(bias)

    forgetful = QuantileBalancer(1, 8, 3)
    observed(forgetful, 0, random_routing(50, bias[0], 3))
    with pytest.raises(ValueError, match=r"begin\(bias\)"):
        forgetful.update(bias)


@pytest.mark.parametrize("mode", ["exact", "histogram"])
def test_a_nan_score_is_an_error_that_names_the_layer(mode: Mode) -> None:
    balancer = QuantileBalancer(2, 8, 3, mode)
    routing = random_routing(50, torch.zeros(8), 3)
    routing.scores[7, 2] = math.nan
    observed(balancer, 1, routing)
    with pytest.raises(ValueError, match="layer 1"):
        balancer.update(torch.zeros(2, 8))


def test_saturated_scores_stay_inside_the_histogram() -> None:
    logits = torch.tensor([[200.0, -200.0, 200.0, -200.0], [-200.0, 200.0, 200.0, -200.0]])
    bias = torch.tensor([[0.3, -0.7, 1.1, -0.7]])
    balancer = QuantileBalancer(1, 4, 1)
    balancer.begin(bias)
    observed(balancer, 0, route_logits(logits, bias[0], 1, with_cutoff=True))
    assert balancer.update(bias).isfinite().all()


def test_routing_changes_no_bias() -> None:
    bias = torch.randn(8)
    before = bias.clone()
    random_routing(50, bias, 3)
    assert torch.equal(bias, before)


def test_the_sign_rule_moves_every_bias_by_gamma_towards_balance() -> None:
    assert torch.allclose(sign_update(torch.zeros(4), torch.tensor([9, 5, 1, 5]), 0.1), torch.tensor([-0.1, 0.0, 0.1, 0.0]))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="top_k < num_experts"):
        QuantileBalancer(1, 4, 4)
    with pytest.raises(ValueError, match="num_bins"):
        QuantileBalancer(1, 4, 2, num_bins=0)
    with pytest.raises(ValueError, match="'median'"):
        QuantileBalancer(1, 4, 2, mode="median")  # type: ignore[arg-type]
    balancer = QuantileBalancer(2, 4, 2, "exact")
    with pytest.raises(ValueError, match="exact mode"):
        _ = balancer.counts
    with pytest.raises(ValueError, match="layer"):
        balancer.observe(2, torch.zeros(3, 4), torch.zeros(3))
    with pytest.raises(ValueError, match="cutoff"):
        balancer.observe(0, torch.zeros(3, 4), torch.zeros(4))
    with pytest.raises(ValueError, match="mask"):
        balancer.observe(0, torch.zeros(3, 4), torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="bias"):
        balancer.update(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="float32"):
        balancer.update(torch.zeros(2, 4).bfloat16())
    with pytest.raises(ValueError, match="shape"):
        sign_update(torch.zeros(4), torch.zeros(5), 0.1)


def two_rank_batches() -> tuple[Tensor, list[list[Tensor]]]:
    """A bias for two layers, and per rank and layer the logits it routes; rank 1 sees nothing in layer 1."""
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(2, 8, generator=generator)
    sizes = [[40, 17], [23, 0]]
    return bias, [[torch.randn(tokens, 8, generator=generator) for tokens in rank] for rank in sizes]


def balance_on_one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    bias, batches = two_rank_batches()
    updated = {}
    for mode in ("exact", "histogram"):
        balancer = QuantileBalancer(2, 8, 3, mode)
        balancer.begin(bias)
        for layer, logits in enumerate(batches[rank]):
            observed(balancer, layer, route_logits(logits, bias[layer], 3, with_cutoff=True))
        balancer.reduce()
        updated[mode] = balancer.update(bias)
    torch.save(updated, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_compute_what_one_would_with_all_the_tokens(tmp_path: Path) -> None:
    mp.start_processes(balance_on_one_rank, args=(str(tmp_path),), nprocs=2, start_method="fork")
    bias, batches = two_rank_batches()
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for mode in ("exact", "histogram"):
        alone = QuantileBalancer(2, 8, 3, mode)
        alone.begin(bias)
        for rank in range(2):
            for layer, logits in enumerate(batches[rank]):
                observed(alone, layer, route_logits(logits, bias[layer], 3, with_cutoff=True))
        alone.reduce()
        expected = alone.update(bias)
        assert all(torch.equal(rank[mode], expected) for rank in ranks)


def balance_experiment(
    steps: int, tokens: int, experts: int, top_k: int, rule: str, skew: float = 1.0, gamma: float = 1e-3, seed: int = 0
) -> tuple[list[float], list[int]]:
    """MaxVio and dead experts of a static, skewed router at every step, each step on fresh tokens and with the bias of the past.

    `rule` is "none", "exact", "histogram" or "sign"; `skew` is the standard deviation of the experts' logit offsets.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = skew * torch.randn(experts, generator=generator)
    projection = torch.randn(48, experts, generator=generator) / math.sqrt(48)
    bias = torch.zeros(1, experts)
    balancer = QuantileBalancer(1, experts, top_k, "exact" if rule == "exact" else "histogram")
    update: dict[str, Callable[[Tensor], Tensor]] = {
        "none": lambda loads: bias,
        "sign": lambda loads: sign_update(bias, loads, gamma),
        "exact": lambda loads: balancer.update(bias),
        "histogram": lambda loads: balancer.update(bias),
    }
    violations, dead = [], []
    for _ in range(steps):
        logits = torch.randn(tokens, 48, generator=generator) @ projection + offsets
        routing = route_logits(logits, bias[0], top_k, with_cutoff=True)
        loads = expert_loads(routing.experts, experts).unsqueeze(0)
        metrics = balance_metrics(loads)
        violations.append(metrics.max_violation[0])
        dead.append(metrics.dead_experts[0])
        if rule in ("exact", "histogram"):
            observed(balancer, 0, routing)
        bias = update[rule](loads)
    return violations, dead


def test_quantile_balancing_needs_one_step_where_the_sign_rule_needs_hundreds() -> None:
    size = {"tokens": 2048, "experts": 64, "top_k": 4}
    none, _ = balance_experiment(2, rule="none", **size)
    exact, exact_dead = balance_experiment(5, rule="exact", **size)
    histogram, _ = balance_experiment(5, rule="histogram", **size)
    sign, _ = balance_experiment(40, rule="sign", gamma=1e-3, **size)
    assert none[1] > 4 and exact[0] == none[0]
    assert exact[1] < none[1] / 5 and max(exact[2:]) < 0.5 and exact_dead[1:] == [0] * 4
    assert abs(histogram[4] - exact[4]) < 0.1
    assert sign[-1] > none[1] / 2
