"""The router's bias between steps."""

from typing import Any

import numpy as np
import pytest
import torch

from perilune.model.decoder import Decoder
from perilune.model.latent_moe import LatentMoE
from perilune.moe.balance_metrics import BalanceMetrics
from perilune.train.evaluate import evaluate, held_out_set
from perilune.train.recipe import RunSettings
from perilune.train.trainer import Trainer
from tests.model.tiny_models import k3_config
from tests.train.tiny_runs import CONFIG, documents, fresh_model, recipe_of, through_a_file, trainer_of

EXPERTS, LAYERS = CONFIG.num_experts, len(CONFIG.moe_layers)


def expert_layers(model: Decoder) -> list[LatentMoE]:
    return [module for module in model.modules() if isinstance(module, LatentMoE)]


def biases(trainer: Trainer) -> torch.Tensor:
    return torch.stack([layer.selection_bias for layer in expert_layers(trainer.model)])


def skewed_trainer(rule: str, by: str = "bias", favoured: int = 2, strength: float = 1.0, **options: Any) -> Trainer:
    """A trainer whose routers prefer the first experts: by the bias for every token, by the weights for half of the tokens each."""
    model = fresh_model()
    with torch.no_grad():
        for layer in expert_layers(model):
            if by == "bias":
                layer.selection_bias[:favoured] += strength
            else:
                layer.gate.weight[:favoured] *= 40.0  # scores near 0 or 1, where the other experts' stay near a half
    return trainer_of(recipe_of({"balance": {"rule": rule, **options}, "optimizer": {"learning_rate": 1e-4}}), model=model)


def violations(trainer: Trainer, steps: int) -> list[float]:
    """The worst layer's MaxVio at each step."""
    return [max(trainer.train_step().balance.max_violation) for _ in range(steps)]


@pytest.mark.parametrize("rule", ["quantile", "histogram"])
def test_two_steps_of_quantile_balancing_undo_a_skew_that_stays_without(rule: str) -> None:
    untouched, balanced = violations(skewed_trainer("none"), 3), violations(skewed_trainer(rule), 3)
    assert balanced[0] == untouched[0] == EXPERTS / 2 - 1  # every token visits the same two
    assert untouched[2] == EXPERTS / 2 - 1
    assert balanced[2] < 0.35 * untouched[2]


def test_a_skew_of_the_weights_is_undone_too() -> None:
    untouched, balanced = violations(skewed_trainer("none", by="weights"), 3), violations(skewed_trainer("quantile", by="weights"), 3)
    assert balanced[0] == untouched[0]
    assert balanced[2] < 0.6 * untouched[2]


def test_dead_experts_are_counted() -> None:
    assert skewed_trainer("none").train_step().balance.dead_experts == (EXPERTS - 2,) * LAYERS
    assert sum(trainer_of(recipe_of()).train_step().balance.dead_experts) == 0


def test_the_sign_rule_moves_each_bias_by_gamma_against_its_load() -> None:
    trainer = skewed_trainer("sign", gamma=0.25)
    before = biases(trainer).clone()
    trainer.train_step()
    moved = biases(trainer) - before
    torch.testing.assert_close(moved, torch.tensor([-0.25] * 2 + [0.25] * (EXPERTS - 2)).expand(LAYERS, -1))


def test_without_a_rule_the_bias_stays() -> None:
    trainer = skewed_trainer("none")
    before = biases(trainer).clone()
    trainer.train_step()
    assert torch.equal(biases(trainer), before)


def test_an_evaluation_neither_moves_the_bias_nor_counts_for_the_next_one() -> None:
    alone, evaluated = trainer_of(recipe_of()), trainer_of(recipe_of())
    run = RunSettings(steps=1, tokens_per_batch=64, max_length=16, eval_tokens=64)
    held_out = held_out_set(documents(), documents(count=4, seed=5), [1] * 32, run, cut=True)
    alone.train_step()
    evaluated.train_step()
    before = biases(evaluated).clone()
    evaluate(evaluated.model, held_out)
    assert torch.equal(biases(evaluated), before)
    assert before.abs().max() > 0
    assert evaluated.train_step() == alone.train_step()
    assert torch.equal(biases(evaluated), biases(alone))


def test_a_restored_histogram_spans_the_restored_bias() -> None:
    # With one more expert lifted than a token visits the margins lie near 6: a range around a bias of zero would end at 1.
    trainer = skewed_trainer("histogram", favoured=3, strength=6.0)
    state = through_a_file(trainer.state())
    fresh = trainer_of(trainer.recipe)
    fresh.restore(0, state)
    assert torch.equal(biases(fresh), biases(trainer)) and float(biases(fresh).max()) == 6.0
    for _ in range(2):
        assert fresh.train_step() == trainer.train_step()
        assert torch.equal(biases(fresh), biases(trainer))
    assert violations(fresh, 1)[0] < 0.35 * (EXPERTS / 2 - 1)


def test_the_bias_has_mean_zero_and_is_the_same_from_both_forms_within_a_bin() -> None:
    exact, histogram = skewed_trainer("quantile"), skewed_trainer("histogram", bins=1000)
    exact.train_step()
    histogram.train_step()
    torch.testing.assert_close(biases(exact).mean(1), torch.zeros(LAYERS), rtol=0, atol=1e-6)
    width = (1.0 + 2.0) / 1000
    torch.testing.assert_close(biases(histogram), biases(exact), rtol=0, atol=2 * width)


@pytest.mark.parametrize("rule", ["quantile", "sign", "none"])
def test_a_model_without_experts_has_nothing_to_balance(rule: str) -> None:
    dense = k3_config(attention=("kda", "mla"), first_k_dense=2)
    trainer = trainer_of(recipe_of({"balance": {"rule": rule}}), model=fresh_model(dense))
    found = trainer.train_step()
    assert found.balance == BalanceMetrics((), (), ())
    assert np.isfinite(found.loss)
