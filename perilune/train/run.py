"""A training run in a directory: recipe.json, tokenizer/, checkpoints/, metrics.jsonl, and at the end model/, a Hub directory."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from perilune.errors import UserError
from perilune.model.hub import save_model
from perilune.model.tokenizer import Tokenizer
from perilune.model.tokenizer_files import write_json
from perilune.train.checkpoint import Checkpoint, CheckpointFolder
from perilune.train.display import LiveProgress, TrainResult, summary
from perilune.train.evaluate import HeldOut, evaluate, held_out_set
from perilune.train.initial_model import build_model, initial_config
from perilune.train.metrics_log import MetricsLog, read_metrics
from perilune.train.packing import PackedDataset
from perilune.train.parallel import Ranks, joined_ranks
from perilune.train.recipe import Recipe, recipe_from_data
from perilune.train.sources import bytes_per_token, prepare
from perilune.train.trainer import DivergedError, StepMetrics, Trainer


def train(recipe: Recipe, out: Path, *, resume: bool, console: Console | None = None) -> TrainResult:
    """Run the recipe in `out`, or continue the run that is there.

    Call it on every rank under torchrun. Raises UserError for anything the user can mend; a run that stops for any reason keeps
    its last good checkpoint and continues with `resume`.
    """
    torch.set_num_threads(recipe.run.threads)
    console = console or Console(stderr=True)
    with joined_ranks() as ranks:
        initial_config(recipe.model)  # what is wrong with the model is said before minutes of reading
        earlier = _claim(out, recipe, resume)
        if earlier is not None and earlier.run.steps != recipe.run.steps and ranks.is_first:
            console.print(f"{earlier.run.steps} steps became {recipe.run.steps}: the learning rate follows the new schedule from here on")
        return _Run(recipe, out, ranks, console).run(resume)


def _claim(out: Path, recipe: Recipe, resume: bool) -> Recipe | None:
    """Make sure that `out` can be written and is free for a new run, or holds the run of this recipe, which is returned, when resuming."""
    file = out / "recipe.json"
    try:
        exists = file.exists()
        if not resume:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out} ({error.strerror}): choose another --out or free space") from None
    if resume:
        if not exists:
            raise UserError(f"{out} holds no run to resume ({file.name} is missing): leave out --resume to start one")
        earlier = _saved_recipe(file)
        mine, theirs = recipe.model_dump(mode="json"), earlier.model_dump(mode="json")
        # More steps or other intervals continue the same run; anything else would make another one of it.
        for data in (mine, theirs):
            for free in ("steps", "eval_every", "eval_tokens", "checkpoint_every", "keep_checkpoints", "threads"):
                data["run"].pop(free)
            data.pop("description")
        if changed := [table for table in mine if mine[table] != theirs[table]]:
            raise UserError(
                f"the run in {out} was made with another [{changed[0]}]: resume with its own recipe ({file}), or start in another directory"
            )
        return earlier
    if exists:
        raise UserError(f"{out} already holds a run: add --resume to continue it, or choose another --out")
    if (out / "checkpoints").exists():
        raise UserError(f"{out} holds checkpoints of a run whose {file.name} is gone: put it back to resume, or choose another --out")
    return None


def _saved_recipe(file: Path) -> Recipe:
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}): the run cannot be resumed without its recipe") from None
    return recipe_from_data(data, str(file))


class _Run:
    def __init__(self, recipe: Recipe, out: Path, ranks: Ranks, console: Console) -> None:
        self._recipe, self._out, self._ranks, self._console = recipe, out, ranks, console
        self._folder = CheckpointFolder(out / "checkpoints", recipe.run.keep_checkpoints)

    def run(self, resume: bool) -> TrainResult:
        recipe, ranks, run = self._recipe, self._ranks, self._recipe.run
        checkpoint = self._folder.latest() if resume else None
        tokenizer_directory = self._out / "tokenizer"
        sources = prepare(recipe, tokenizer_directory if checkpoint else None)
        self._say(sources.summary)
        data = PackedDataset(
            sources.train, tokens_per_batch=run.tokens_per_batch, max_length=run.max_length, cut=sources.cut,
            seed=run.seed, rank=ranks.rank, world_size=ranks.world,
        )  # fmt: skip
        if data.dropped.too_long or data.dropped.without_targets:
            dropped = data.dropped
            self._say(f"left out: {dropped.too_long} longer than {run.max_length} tokens, {dropped.without_targets} with nothing to learn")
        held_out = held_out_set(sources.train, sources.held_out, bytes_per_token(sources.tokenizer), run, sources.cut)
        model = build_model(recipe, sources.tokenizer)
        trainer = Trainer(model, data, recipe, ranks)
        if checkpoint is not None:
            trainer.restore(checkpoint.step, checkpoint.content)
            self._say(f"resumed after step {checkpoint.step}")
        # Only now: a run that could not begin leaves its directory free. Every rank has looked at it before the first one writes.
        ranks.wait()
        if ranks.is_first:
            self._record(None if checkpoint else sources.tokenizer)
        # A run at its start writes the baselines of step 0, also where a killed one already had.
        log = MetricsLog(self._out / "metrics.jsonl", resume_step=trainer.step or -1) if ranks.is_first else None
        try:
            last_score = self._loop(trainer, held_out, log)
        except KeyboardInterrupt:
            kept = self._folder.files()
            self._say(
                f"stopped at step {trainer.step}; add --resume to go on from {kept[-1]}" if kept else "stopped before the first checkpoint"
            )
            raise
        finally:
            if log is not None:
                log.close()
        final = evaluate(model, held_out) if last_score is None else last_score
        return self._finish(trainer, held_out, sources.tokenizer, final)

    def _record(self, tokenizer: Tokenizer | None) -> None:
        """Write the recipe, and the tokenizer of a new run. Fields that were not given stay out: some may not be given together."""
        try:
            write_json(self._out / "recipe.json", self._recipe.model_dump(mode="json", exclude_unset=True))
            if tokenizer is not None:
                tokenizer.save(self._out / "tokenizer")
        except OSError as error:
            raise UserError(f"cannot write to {self._out} ({error.strerror}): choose another --out or free space") from None

    def _loop(self, trainer: Trainer, held_out: HeldOut, log: MetricsLog | None) -> float | None:
        """Train to the last step; its held-out bits per byte, or None where nothing was left to do or another rank evaluates."""
        run = self._recipe.run
        score: float | None = None
        if trainer.step == 0:
            self._save(trainer)
            if log is not None:
                log.write(0, held_out_bits_per_byte=evaluate(trainer.model, held_out), unigram_bits_per_byte=held_out.unigram_bits_per_byte)
        with self._progress(trainer.step, run.steps) as progress:
            while trainer.step < run.steps:
                start = time.perf_counter()
                try:
                    metrics = trainer.train_step()
                except DivergedError as error:
                    kept = self._folder.files()
                    raise UserError(f"{error} ({kept[-1] if kept else 'none yet'})") from None
                speed = metrics.tokens / (time.perf_counter() - start)
                due = trainer.step % run.eval_every == 0 or trainer.step == run.steps
                if log is not None:
                    score = evaluate(trainer.model, held_out) if due else None
                    scored = {} if score is None else {"held_out_bits_per_byte": score}
                    log.write(trainer.step, **_values(metrics), tokens_per_s=speed, **scored)
                    progress.update(metrics.loss, speed, score)
                if trainer.step % run.checkpoint_every == 0 or trainer.step == run.steps:
                    self._save(trainer)
        return score

    def _save(self, trainer: Trainer) -> None:
        """One rank writes; if it cannot, all stop."""
        failure: UserError | None = None
        if self._ranks.is_first:
            try:
                self._folder.save(Checkpoint(trainer.step, trainer.state()))
            except UserError as error:
                failure = error
        if self._ranks.any(failure is not None):
            raise failure or UserError("the first rank could not write the checkpoint: see its message")

    def _finish(self, trainer: Trainer, held_out: HeldOut, tokenizer: Tokenizer, final: float) -> TrainResult:
        directory = self._out / "model"
        if self._ranks.is_first:
            save_model(trainer.model, directory)
            try:
                tokenizer.save(directory)
            except OSError as error:
                raise UserError(f"cannot write the tokenizer to {directory} ({error.strerror}): free space and resume") from None
        self._ranks.wait()
        lines = read_metrics(self._out / "metrics.jsonl")
        # Not there when someone removed the file in the middle of the run.
        untrained = next((line["held_out_bits_per_byte"] for line in lines if line["step"] == 0), math.nan)
        result = TrainResult(directory, final, untrained, held_out.unigram_bits_per_byte)
        if self._ranks.is_first:
            self._console.print(summary(result))
        return result

    def _say(self, text: str) -> None:
        if self._ranks.is_first:
            self._console.print(text)

    def _progress(self, done: int, steps: int) -> LiveProgress:
        return LiveProgress(self._console, done, steps, visible=self._ranks.is_first)


def _values(metrics: StepMetrics) -> dict[str, Any]:
    """A step's line in metrics.jsonl; balance is the worst layer's, dead experts those of all layers."""
    balance = metrics.balance
    return {
        "loss": metrics.loss,
        "gradient_norm": metrics.gradient_norm,
        "learning_rate_factor": metrics.learning_rate_factor,
        "tokens": metrics.tokens,
        "max_violation": max(balance.max_violation, default=0.0),
        "load_variation": max(balance.coefficient_of_variation, default=0.0),
        "dead_experts": sum(balance.dead_experts),
    }
