import math

import pytest
import torch

from perilune.moe.balance_metrics import balance_metrics, expert_loads


def test_loads_count_every_choice() -> None:
    loads = expert_loads(torch.tensor([[0, 3], [3, 1], [3, 0]]), 5)
    assert loads.dtype == torch.int64
    assert loads.tolist() == [2, 1, 0, 3, 0]
    assert expert_loads(torch.zeros(0, 2, dtype=torch.int64), 3).tolist() == [0, 0, 0]


def test_even_loads_measure_zero() -> None:
    metrics = balance_metrics(torch.full((2, 4), 7))
    assert metrics.max_violation == (0.0, 0.0) and metrics.coefficient_of_variation == (0.0, 0.0) and metrics.dead_experts == (0, 0)


def test_each_layer_is_measured_by_itself() -> None:
    metrics = balance_metrics(torch.tensor([[4, 0, 0, 0], [3, 1, 2, 2]]))
    assert metrics.max_violation == (3.0, 0.5)
    assert metrics.coefficient_of_variation == pytest.approx((math.sqrt(3), math.sqrt(0.5) / 2))
    assert metrics.dead_experts == (3, 0)


def test_a_layer_without_tokens_is_all_dead_and_finite() -> None:
    metrics = balance_metrics(torch.zeros(1, 4, dtype=torch.int64))
    assert (metrics.max_violation, metrics.coefficient_of_variation, metrics.dead_experts) == ((0.0,), (0.0,), (4,))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"0\.\.3"):
        expert_loads(torch.tensor([[0, 4]]), 4)
    with pytest.raises(ValueError, match=r"0\.\.3.*-1"):
        expert_loads(torch.tensor([[0, -1]]), 4)
    with pytest.raises(ValueError, match="layers"):
        balance_metrics(torch.zeros(4))
