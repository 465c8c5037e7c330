"""Trainer: one optimizer step after another, each from the data cursor, resumable to the identical next loss."""

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perilune.errors import UserError
from perilune.model.batch import SequenceLayout
from perilune.model.decoder import Decoder
from perilune.moe.balance_metrics import BalanceMetrics
from perilune.train.balance import RouterBalance
from perilune.train.optimizer import build_optimizers, clip_gradients
from perilune.train.packing import IGNORED_TARGET, DataCursor, PackedDataset
from perilune.train.parallel import Ranks
from perilune.train.recipe import Recipe
from perilune.train.roles import parameter_roles
from perilune.train.schedule import build_schedule


class DivergedError(UserError):
    """The loss or the gradient stopped being finite; nothing of the step was applied."""


@dataclass(frozen=True)
class StepMetrics:
    """One step over all ranks. `loss` is the mean over all target tokens, in nats; `tokens` counts all tokens of the step."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate_factor: float
    tokens: int
    balance: BalanceMetrics


class Trainer:
    """Model, optimizers, data and router balance of one run. All ranks hold the same state at every step's end."""

    def __init__(self, model: Decoder, data: PackedDataset, recipe: Recipe, ranks: Ranks) -> None:
        self.model, self.data, self.recipe, self.ranks = model, data, recipe, ranks
        self.step = 0
        self._schedule = build_schedule(recipe.schedule, recipe.run.steps)
        self._optimizers = build_optimizers(model.named_parameters(), parameter_roles(model), recipe.optimizer)
        self._balance = RouterBalance(model, recipe.balance, ranks)
        self._forward: nn.Module = DistributedDataParallel(model) if ranks.world > 1 else model

    def train_step(self) -> StepMetrics:
        """Advance by one step. Raises DivergedError, with nothing changed but the data cursor, when loss or gradient is not finite."""
        run = self.recipe.run
        batches = [self.data.next_batch() for _ in range(run.micro_batches)]
        counts = self.ranks.sum(torch.tensor([sum(b.num_targets for b in batches), sum(len(b.ids) for b in batches)]))
        targets, tokens = (int(n) for n in counts)
        self._optimizers.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with self._without_gradient_exchange(skip=not last):
                with self._autocast():
                    logits = self._forward(batch.ids, SequenceLayout(batch.lengths), observer=self._balance.observe)
                loss = F.cross_entropy(logits.float(), batch.targets, ignore_index=IGNORED_TARGET, reduction="sum")
                # DDP averages over ranks, the loss is a mean over all ranks' targets: the world size makes up for it.
                (loss * (self.ranks.world / max(targets, 1))).backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double()
        mean = self.ranks.sum(total).item() / max(targets, 1)
        norm = clip_gradients(self.model.parameters(), self.recipe.optimizer.clip_norm)
        if not (math.isfinite(mean) and math.isfinite(norm)):
            self._balance.begin()
            raise DivergedError(
                f"at step {self.step + 1} the loss became {mean} and the gradient norm {norm}: lower optimizer.learning_rate or look "
                "at the data, then resume from the last good checkpoint"
            )
        factor = self._schedule.factor(self.step)
        self._optimizers.set_learning_rate(factor)
        self._optimizers.step()
        balance = self._balance.finish_step()
        self.step += 1
        return StepMetrics(self.step, mean, norm, factor, tokens, balance)

    def _without_gradient_exchange(self, skip: bool) -> contextlib.AbstractContextManager[Any]:
        """Exchange gradients with the other ranks in the last micro-batch of a step only."""
        if skip and isinstance(self._forward, DistributedDataParallel):
            return cast("contextlib.AbstractContextManager[Any]", self._forward.no_sync())
        return contextlib.nullcontext()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.run.dtype == "bfloat16")

    def state(self) -> dict[str, Any]:
        """Tensors and plain data that `restore` takes."""
        return {
            "model": self.model.state_dict(),
            "optimizers": self._optimizers.state_dict(),
            "data": dataclasses.asdict(self.data.state()),
            "rng": torch.get_rng_state(),
        }

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Continue as if the run had never stopped. Raises UserError when the state belongs to another model or data set."""
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise UserError(
                f"the checkpoint holds another model ({str(error).splitlines()[-1].strip()}): resume with the recipe it was made with"
            ) from None
        self._optimizers.load_state_dict(state["optimizers"])
        self.data.restore(DataCursor(**state["data"]))
        torch.set_rng_state(state["rng"])
        self._balance.begin()
        self.step = step
