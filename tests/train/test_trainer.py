"""The trainer: one step after another, and the same ones after a restart."""

import copy
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from perilune.errors import UserError
from perilune.model.batch import SequenceLayout
from perilune.train.packing import IGNORED_TARGET, TokenDocuments
from perilune.train.trainer import DivergedError, StepMetrics, Trainer
from tests.model.tiny_models import k3_config
from tests.train.tiny_runs import CONFIG, documents, fresh_model, recipe_of, through_a_file, trainer_of


def everything_of(trainer: Trainer) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of the trainer's state: parameters, biases, moments."""

    def walk(value: object, place: str) -> list[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            return [(place, value.clone())]
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        return [found for key, item in items for found in walk(item, f"{place}.{key}")]

    return walk(trainer.state(), "")


def assert_same(found: list[tuple[str, torch.Tensor]], expected: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, tensor), (_, wanted) in zip(found, expected, strict=True):
        assert torch.equal(tensor, wanted), name


BALANCES: dict[str, dict[str, Any]] = {"quantile": {}, "histogram": {"bins": 64}, "sign": {"gamma": 0.01}, "none": {}}


@pytest.mark.parametrize("rule", BALANCES)
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_restored_run_goes_on_bit_for_bit(kind: str, rule: str) -> None:
    recipe = recipe_of({"optimizer": {"kind": kind}, "balance": {"rule": rule, **BALANCES[rule]}})
    trainer = trainer_of(recipe)
    for _ in range(2):
        trainer.train_step()
    state = through_a_file(trainer.state())
    expected = [trainer.train_step() for _ in range(2)]
    other = trainer_of(recipe, model=fresh_model(seed=9))
    other.restore(2, state)
    assert [other.train_step() for _ in range(2)] == expected
    assert_same(everything_of(other), everything_of(trainer))


def test_the_random_state_is_restored() -> None:
    trainer = trainer_of(recipe_of())
    state = through_a_file(trainer.state())
    expected = torch.rand(3)
    torch.manual_seed(99)
    trainer.restore(0, state)
    assert torch.equal(torch.rand(3), expected)


def test_two_half_batches_are_one_batch() -> None:
    texts = documents(count=24)  # each fills a sequence, so both ways see the same ones
    whole, halves = trainer_of(recipe_of(), texts), trainer_of(recipe_of(tokens_per_batch=32, micro_batches=2), texts)
    for _ in range(3):
        one, two = whole.train_step(), halves.train_step()
        assert two.tokens == one.tokens == 64
        assert two.loss == pytest.approx(one.loss, rel=1e-5)
        assert two.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-4)
        assert two.balance == one.balance
    half = trainer_of(recipe_of(tokens_per_batch=32), texts)
    half.train_step()
    assert half.train_step().loss != pytest.approx(one.loss, rel=1e-5)


def with_masks(counts: list[int]) -> TokenDocuments:
    """Conversations of 16 tokens, the last `count` of each to be learned."""
    plain = documents(len(counts))
    mask = np.concatenate([np.arange(16) >= 16 - count for count in counts])
    return TokenDocuments(plain.tokens, plain.offsets, None, mask)


def test_the_loss_is_the_mean_over_all_targets_of_the_step_and_nothing_else() -> None:
    texts = with_masks([1, 3, 12, 2])
    trainer = trainer_of(recipe_of(tokens_per_batch=32, micro_batches=2), texts)
    model = copy.deepcopy(trainer.model)
    total, count = 0.0, 0
    for index in range(4):
        ids = torch.from_numpy(texts.document(index).astype(np.int64))
        with torch.no_grad():
            log_probabilities = model(ids, SequenceLayout((16,))).log_softmax(-1)
        assert texts.target_mask is not None
        for place in range(1, 16):
            if texts.target_mask[16 * index + place]:
                total -= log_probabilities[place - 1, ids[place]].item()
                count += 1
    found = trainer.train_step()
    assert count == 18
    assert found.loss == pytest.approx(total / 18, rel=1e-5)
    assert found.tokens == 64


def test_the_gradient_is_that_of_the_mean_over_targets() -> None:
    texts = with_masks([1, 3, 12, 2])
    trainer = trainer_of(recipe_of({"optimizer": {"clip_norm": None}}, tokens_per_batch=32, micro_batches=2), texts)
    reference = copy.deepcopy(trainer.model)
    other = copy.deepcopy(trainer.data)
    batches = [other.next_batch(), other.next_batch()]
    ids, targets = torch.cat([b.ids for b in batches]), torch.cat([b.targets for b in batches])
    logits = reference(ids, SequenceLayout(tuple(n for b in batches for n in b.lengths)))
    torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET).backward()
    trainer.train_step()
    for (name, parameter), expected in zip(trainer.model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is not None:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-3, atol=1e-6, msg=name)


def poison_weight(trainer: Trainer) -> Any:
    weight = trainer.model.lm_head.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[3, 3] = math.inf

    def mend() -> None:
        with torch.no_grad():
            weight.copy_(kept)

    return mend


def poison_gradient(trainer: Trainer) -> Any:
    return trainer.model.norm.weight.register_hook(lambda gradient: gradient * math.nan).remove


@pytest.mark.parametrize(("poison", "rule"), [(poison_weight, "histogram"), (poison_gradient, "quantile")])
def test_a_step_that_is_not_finite_is_named_and_nothing_of_it_is_applied(poison: Any, rule: str) -> None:
    recipe = recipe_of({"balance": {"rule": rule}})
    trainer, twin = trainer_of(recipe), trainer_of(recipe)
    for one in (trainer, twin):
        one.train_step()
        one.train_step()
    mend = poison(trainer)
    before = everything_of(trainer)
    with pytest.raises(DivergedError, match=r"at step 3 the loss became .* and the gradient norm nan: lower optimizer") as caught:
        trainer.train_step()
    assert isinstance(caught.value, UserError)
    assert_same(everything_of(trainer), before)
    assert trainer.step == 2
    # Once mended it goes on as if that batch had never been: its routings are forgotten too.
    mend()
    twin.data.next_batch()
    assert trainer.train_step() == twin.train_step()
    assert_same(everything_of(trainer), everything_of(twin))


def gradient_norm(trainer: Trainer) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in trainer.model.parameters() if p.grad is not None))


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_reported() -> None:
    free, clipped = (trainer_of(recipe_of({"optimizer": {"clip_norm": norm}})) for norm in (None, 0.01))
    loose, tight = free.train_step(), clipped.train_step()
    assert loose.gradient_norm == tight.gradient_norm > 0.1
    assert gradient_norm(free) == pytest.approx(loose.gradient_norm, rel=1e-4)
    assert gradient_norm(clipped) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_loss_of_a_repeated_batch_falls(kind: str, dtype: str) -> None:
    recipe = recipe_of({"optimizer": {"kind": kind, "learning_rate": 2e-2}, "schedule": {"floor": 1.0}}, dtype=dtype)
    trainer = trainer_of(recipe, documents(count=4))
    first, *_, last = [trainer.train_step().loss for _ in range(12)]
    assert first == pytest.approx(math.log(32), abs=0.2)
    assert last < first - 0.4
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_bfloat16_multiplies_in_bfloat16_and_stays_near_float32() -> None:
    seen: dict[str, torch.dtype] = {}
    found: dict[str, StepMetrics] = {}
    for dtype in ("bfloat16", "float32"):
        trainer = trainer_of(recipe_of(dtype=dtype))

        def record(module: object, inputs: object, output: torch.Tensor, dtype: str = dtype) -> None:
            seen[dtype] = output.dtype

        trainer.model.lm_head.register_forward_hook(record)
        found[dtype] = trainer.train_step()
    assert seen == {"bfloat16": torch.bfloat16, "float32": torch.float32}
    assert found["bfloat16"].loss == pytest.approx(found["float32"].loss, rel=2e-3)
    assert found["bfloat16"].gradient_norm == pytest.approx(found["float32"].gradient_norm, rel=0.03)


def test_the_schedule_sets_the_rate_of_each_step() -> None:
    trainer = trainer_of(recipe_of({"schedule": {"kind": "cosine", "warmup_fraction": 0.5}}, steps=4))
    assert [trainer.train_step().learning_rate_factor for _ in range(4)] == pytest.approx([0.5, 1.0, 1.0, 0.0])
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train_step()  # beyond the end the rate stays at the floor, here 0
    assert all(torch.equal(parameter, old) for parameter, old in zip(trainer.model.parameters(), before, strict=True))


def test_metrics_are_plain_numbers_of_every_expert_layer() -> None:
    found = trainer_of(recipe_of()).train_step()
    assert isinstance(found, StepMetrics)
    assert asdict(found)["step"] == 1 and found.tokens == 64
    assert len(found.balance.max_violation) == len(found.balance.dead_experts) == len(CONFIG.moe_layers) == 2


def test_the_state_of_another_model_is_refused_in_one_sentence() -> None:
    state = trainer_of(recipe_of()).state()
    larger = trainer_of(recipe_of(), model=fresh_model(k3_config(attention=CONFIG.attention, vocab_size=40)))
    with pytest.raises(UserError, match="holds another model") as caught:
        larger.restore(0, state)
    assert "\n" not in str(caught.value)


def test_the_state_of_another_optimizer_or_other_data_is_refused() -> None:
    state = trainer_of(recipe_of()).state()
    with pytest.raises(UserError, match="optimizer kind 'muon', not 'adamw'"):
        trainer_of(recipe_of({"optimizer": {"kind": "adamw"}})).restore(0, state)
    with pytest.raises(UserError, match="other data"):
        trainer_of(recipe_of(), documents(seed=1)).restore(0, state)
