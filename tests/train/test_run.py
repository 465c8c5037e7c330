"""Runs in a directory: what they leave, how they are resumed, and how they are refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perilune.errors import UserError
from perilune.model.hub import load_model
from perilune.model.tokenizer import ByteTokenizer, load_tokenizer
from perilune.train import run as module
from perilune.train.checkpoint import CheckpointFolder
from perilune.train.display import TrainResult
from perilune.train.metrics_log import read_metrics
from perilune.train.recipe import recipe_from_data
from perilune.train.trainer import StepMetrics, Trainer
from tests.train.tiny_runs import VOCABULARY, comparable_metrics, recipe_tables, start, write_config, write_corpus


def refusal(tables: dict[str, Any], out: Path, *, resume: bool = False) -> str:
    """The one sentence with which a run is refused."""
    with pytest.raises(UserError) as caught:
        start(tables, out, resume=resume)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, TrainResult, str]:
    """(recipe, directory, result, printed) of a run of four steps; tests that go on with it copy it."""
    place = tmp_path_factory.mktemp("finished")
    tables = recipe_tables(place)
    return tables, place / "run", *start(tables, place / "run")


def test_a_run_reports_what_its_metrics_and_its_model_say(finished: tuple[dict[str, Any], Path, TrainResult, str]) -> None:
    _, out, result, printed = finished
    lines = comparable_metrics(out)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert result.untrained_bits_per_byte == lines[0]["held_out_bits_per_byte"] == pytest.approx(math.log2(VOCABULARY), abs=0.1)
    assert result.unigram_bits_per_byte == lines[0]["unigram_bits_per_byte"] < 5
    assert result.bits_per_byte == lines[4]["held_out_bits_per_byte"] < result.untrained_bits_per_byte
    assert [("held_out_bits_per_byte" in line) for line in lines] == [True, False, True, False, True]
    assert lines[1].keys() >= {"loss", "gradient_norm", "learning_rate_factor", "max_violation", "load_variation", "dead_experts"}
    assert all(line["tokens_per_s"] > 0 for line in read_metrics(out / "metrics.jsonl")[1:])
    assert result.model_directory == out / "model"
    assert load_model(out / "model").config.eos_token_id == load_tokenizer(out / "model").end_of_message_id
    assert [path.name for path in CheckpointFolder(out / "checkpoints", 2).files()] == ["step-00000002.pt", "step-00000004.pt"]
    for value in (result.bits_per_byte, result.unigram_bits_per_byte, result.untrained_bits_per_byte):
        assert f"{value:.3f}" in printed


def test_the_recipe_in_the_directory_starts_the_same_run(finished: tuple[dict[str, Any], Path, TrainResult, str], tmp_path: Path) -> None:
    tables, out, *_ = finished
    saved = json.loads((out / "recipe.json").read_text())
    assert recipe_from_data(saved, "recipe.json") == recipe_from_data(tables, "recipe")
    start(saved, tmp_path / "again")
    assert comparable_metrics(tmp_path / "again") == comparable_metrics(out)


class Interruption:
    """Ctrl-C in place of a training step, once `steps` are done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        original = Trainer.train_step

        def train_step(trainer: Trainer) -> StepMetrics:
            if trainer.step == steps:
                raise KeyboardInterrupt
            return original(trainer)

        monkeypatch.setattr(Trainer, "train_step", train_step)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_run_that_was_stopped_anywhere_continues_to_the_same_metrics(
    finished: tuple[dict[str, Any], Path, TrainResult, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    tables, whole, *_ = finished
    with monkeypatch.context() as patch:
        Interruption(patch, steps)
        with pytest.raises(KeyboardInterrupt):
            start(tables, tmp_path / "run")
    assert [line["step"] for line in comparable_metrics(tmp_path / "run")] == list(range(steps + 1))
    _, printed = start(tables, tmp_path / "run", resume=True)
    assert f"resumed after step {steps // 2 * 2}" in printed
    assert comparable_metrics(tmp_path / "run") == comparable_metrics(whole)


def test_a_run_that_was_stopped_before_its_first_checkpoint_starts_over(
    finished: tuple[dict[str, Any], Path, TrainResult, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, whole, *_ = finished

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(tables, tmp_path / "run")
    start(tables, tmp_path / "run", resume=True)
    assert comparable_metrics(tmp_path / "run") == comparable_metrics(whole)


def test_more_steps_and_other_intervals_continue_the_run_and_the_schedule_is_said_to_change(tmp_path: Path) -> None:
    tables = recipe_tables(tmp_path)
    start(tables, tmp_path / "run")
    before = comparable_metrics(tmp_path / "run")
    tables["run"] |= {"steps": 6, "eval_every": 5, "checkpoint_every": 1, "keep_checkpoints": 1}
    _, printed = start(tables, tmp_path / "run", resume=True)
    assert "4 steps became 6: the learning rate follows the new schedule from here on" in printed
    after = comparable_metrics(tmp_path / "run")
    assert after[:5] == before and [line["step"] for line in after] == list(range(7))
    assert before[4]["learning_rate_factor"] == 0.0 and after[5]["learning_rate_factor"] > 0.0
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["run"]["steps"] == 6
    _, printed = start(tables, tmp_path / "run", resume=True)
    assert "became" not in printed
    assert comparable_metrics(tmp_path / "run") == after


@pytest.mark.parametrize(
    ("table", "fields"),
    [
        ("optimizer", {"learning_rate": 1e-3}),
        ("schedule", {"floor": 0.5}),
        ("balance", {"rule": "none"}),
        ("corpus", {"held_out_fraction": 0.3}),
        ("tokenizer", {"kind": "bpe", "vocab_size": 300}),
        ("run", {"seed": 1}),
        ("run", {"micro_batches": 2}),
    ],
)
def test_a_run_is_not_resumed_with_another_recipe(
    finished: tuple[dict[str, Any], Path, TrainResult, str], table: str, fields: dict[str, Any]
) -> None:
    tables, out, *_ = finished
    changed = {**tables, table: {**tables.get(table, {}), **fields}}
    before = (out / "recipe.json").read_bytes()
    message = refusal(changed, out, resume=True)
    assert f"made with another [{table}]" in message and str(out / "recipe.json") in message
    assert (out / "recipe.json").read_bytes() == before


def test_a_directory_that_holds_a_run_is_not_started_in_and_one_that_holds_none_not_resumed(
    finished: tuple[dict[str, Any], Path, TrainResult, str], tmp_path: Path
) -> None:
    tables, out, *_ = finished
    assert "add --resume" in refusal(tables, out)
    assert "holds no run to resume" in refusal(tables, tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "recipe.json is gone" in refusal(tables, tmp_path / "run")


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = recipe_tables(tmp_path)
    monkeypatch.setattr(module, "prepare", pytest.fail)
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("x" * 300)):
        assert "choose another --out" in refusal(tables, out)
    for out in (tmp_path / "file", tmp_path / ("x" * 300)):
        assert str(out) in refusal(tables, out, resume=True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("", "is damaged"), ('{"model": ', "is damaged"), ("[]", "recipe.json: "), ('{"run": {"steps": 3}}', "recipe.json: model: ")],
)
def test_a_damaged_recipe_is_named(
    finished: tuple[dict[str, Any], Path, TrainResult, str], tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "recipe.json").write_text(content)
    message = refusal(finished[0], tmp_path, resume=True)
    assert str(tmp_path / "recipe.json") in message and reason in message


def test_a_damaged_tokenizer_or_checkpoint_is_named(tmp_path: Path) -> None:
    tables = recipe_tables(tmp_path, steps=1)
    start(tables, tmp_path / "run")
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text("{")
    assert "tokenizer.json is not valid JSON" in refusal(tables, tmp_path / "run", resume=True)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes(b"garbage")
    assert "none of the 2 checkpoints" in refusal(tables, tmp_path / "run", resume=True)


def test_a_run_that_could_not_begin_leaves_its_directory_free(tmp_path: Path) -> None:
    tables = recipe_tables(tmp_path, steps=1)
    (tmp_path / "empty").mkdir()
    wrong = {**tables, "corpus": {**tables["corpus"], "path": str(tmp_path / "empty")}}
    assert "No usable text" in refusal(wrong, tmp_path / "run")
    start(tables, tmp_path / "run")


def small_model(tables: dict[str, Any], place: Path) -> dict[str, Any]:
    return {**tables, "model": {"config": str(write_config(place / "small.json", vocab_size=ByteTokenizer().vocab_size - 1))}}


def one_document(tables: dict[str, Any], place: Path) -> dict[str, Any]:
    return {**tables, "corpus": {**tables["corpus"], "path": str(write_corpus(place / "one", count=1))}}


def nothing_held_out(tables: dict[str, Any], place: Path) -> dict[str, Any]:
    return {**tables, "corpus": {**tables["corpus"], "held_out_fraction": 0.0}}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (small_model, f"the tokenizer has {ByteTokenizer().vocab_size} tokens but the model only {ByteTokenizer().vocab_size - 1}"),
        (one_document, "single document"),
        (nothing_held_out, "held_out_fraction is 0"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, spoil: Callable[[dict[str, Any], Path], dict[str, Any]], reason: str) -> None:
    assert reason in refusal(spoil(recipe_tables(tmp_path), tmp_path), tmp_path / "run")


def test_a_diverged_run_names_the_step_and_the_last_checkpoint_and_can_be_resumed(tmp_path: Path) -> None:
    tables = {**recipe_tables(tmp_path, checkpoint_every=1), "optimizer": {"kind": "adamw", "learning_rate": 1e30}}
    message = refusal(tables, tmp_path / "run")
    step = [line["step"] for line in comparable_metrics(tmp_path / "run")][-1]
    kept = CheckpointFolder(tmp_path / "run" / "checkpoints", 2).files()
    assert f"at step {step + 1} the loss became" in message and str(kept[-1]) in message
    assert kept[-1].name == f"step-{step:08d}.pt"
    assert f"at step {step + 1} the loss became" in refusal(tables, tmp_path / "run", resume=True)


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["write_json", "ByteTokenizer.save", "torch.save", "MetricsLog.write"])
def test_a_full_disk_is_one_sentence_wherever_it_strikes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tables = recipe_tables(tmp_path, steps=1)
    with monkeypatch.context() as patch:
        if name == "MetricsLog.write":
            patch.setattr("perilune.train.metrics_log.os.write", full_disk)
        elif name == "write_json":
            patch.setattr(module, name, full_disk)
        elif name == "torch.save":
            patch.setattr("perilune.train.checkpoint.torch.save", full_disk)
        else:
            patch.setattr(ByteTokenizer, "save", full_disk)
        message = refusal(tables, tmp_path / "run")
    assert "free space" in message and ("No space left on device" in message or "the disk is full" in message)
    # What could not be recorded is started, what was recorded is resumed.
    start(tables, tmp_path / "run", resume=(tmp_path / "run" / "recipe.json").exists())
    assert [line["step"] for line in comparable_metrics(tmp_path / "run")] == [0, 1]


def test_a_run_whose_metrics_were_removed_still_finishes(tmp_path: Path) -> None:
    tables = recipe_tables(tmp_path, steps=2)
    start(tables, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    tables["run"]["steps"] = 3
    result, _ = start(tables, tmp_path / "run", resume=True)
    assert math.isnan(result.untrained_bits_per_byte) and result.bits_per_byte < 9
    assert [line["step"] for line in comparable_metrics(tmp_path / "run")] == [3]
