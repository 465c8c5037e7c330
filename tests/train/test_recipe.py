"""Recipes: what loads, and how each mistake in one is named."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.errors import UserError
from perilune.model.tokenizer import ByteTokenizer
from perilune.train.initial_model import build_model
from perilune.train.recipe import Recipe, load_recipe, packaged_recipes, recipe_from_data

MINIMAL: dict[str, Any] = {"model": {"preset": "k3-tiny"}, "tokenizer": {"kind": "byte"}, "corpus": {}, "run": {"steps": 1}}
CHAT = {"corpus": None, "chat": {"path": "chat.jsonl"}}


def changed(tables: dict[str, Any]) -> dict[str, Any]:
    """MINIMAL with fields added to its tables; None removes a table or a field."""
    data = copy.deepcopy(MINIMAL)
    for table, fields in tables.items():
        data[table] = {**data.get(table, {}), **fields} if isinstance(fields, dict) else fields
        if isinstance(fields, dict):
            data[table] = {name: value for name, value in data[table].items() if value is not None}
    return {table: fields for table, fields in data.items() if fields is not None}


def test_there_are_packaged_recipes() -> None:
    assert "k3-tiny-stdlib" in packaged_recipes()


@pytest.mark.parametrize("name", packaged_recipes())
def test_a_packaged_recipe_says_what_it_is_and_builds_its_model(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.description.strip()
    with torch.device("meta"):
        model = build_model(recipe, ByteTokenizer())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.config.vocab_size == ByteTokenizer().vocab_size


def test_a_recipe_is_read_from_a_path_with_defaults_for_what_it_leaves_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\npreset = "k3-tiny"\n[tokenizer]\nkind = "byte"\n[corpus]\n[run]\nsteps = 7\n', encoding="utf-8")
    recipe = load_recipe(str(file))
    assert recipe == recipe_from_data(changed({"run": {"steps": 7}}), "here")
    assert (recipe.run.steps, recipe.optimizer.kind, recipe.balance.rule, recipe.run.micro_batches) == (7, "muon", "quantile", 1)


def test_all_three_ways_to_a_model_and_both_kinds_of_data_are_accepted() -> None:
    for tables in (
        {},
        {"model": {"preset": None, "config": "config.json"}},
        {"model": {"preset": None, "init_from": "model"}, "tokenizer": None},
        {"tokenizer": {"kind": "directory", "directory": "tokenizer"}},
        CHAT,
        {**CHAT, "model": {"preset": None, "init_from": "model"}, "tokenizer": None},
    ):
        assert isinstance(recipe_from_data(changed(tables), "mine.toml"), Recipe)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown table": ({"optimiser": {"kind": "muon"}}, "optimiser"),
    "no run": ({"run": None}, "run: "),
    "no steps": ({"run": {"steps": None}}, "run.steps: "),
    "table no table": ({"run": 3}, "run: "),
    **{
        f"unknown field of {table}": ({**tables, table: {**tables.get(table, {}), "colour": 1}}, f"{table}.colour: ")
        for table, tables in {
            "model": {},
            "tokenizer": {},
            "corpus": {},
            "chat": CHAT,
            "optimizer": {},
            "schedule": {},
            "balance": {},
            "run": {},
        }.items()
    },
    "two models": ({"model": {"config": "config.json"}}, "exactly one of preset, config and init_from"),
    "no model": ({"model": {"preset": None}}, "exactly one of preset, config and init_from"),
    "tokenizer directory without kind": ({"tokenizer": {"directory": "x"}}, "tokenizer: directory"),
    "tokenizer kind without directory": ({"tokenizer": {"kind": "directory"}}, "tokenizer: directory"),
    "tokenizer kind": ({"tokenizer": {"kind": "words"}}, "tokenizer.kind: "),
    "vocabulary too small": ({"tokenizer": {"kind": "bpe", "vocab_size": 299}}, "tokenizer.vocab_size: "),
    "no data": ({"corpus": None}, "[corpus] or on [chat]"),
    "two kinds of data": ({"chat": {"path": "chat.jsonl"}}, "[corpus] or on [chat]"),
    "corpus without path": ({"corpus": {"source": "directory"}}, "corpus: source = 'directory' needs a path"),
    "corpus field that is not read": ({"corpus": {"path": "texts"}}, "corpus: path is read only when"),
    "two tokenizers": ({"model": {"preset": None, "init_from": "model"}}, "remove [tokenizer]"),
    "no tokenizer": ({"tokenizer": None}, "needs a [tokenizer] table"),
    "BPE of conversations": ({**CHAT, "tokenizer": {"kind": "bpe"}}, "a BPE is trained on a corpus"),
    "all held out": ({**CHAT, "chat": {"path": "x", "held_out_fraction": 1.0}}, "chat.held_out_fraction: "),
    "no learning rate": ({"optimizer": {"learning_rate": 0}}, "optimizer.learning_rate: "),
    "infinite learning rate": ({"optimizer": {"learning_rate": float("inf")}}, "optimizer.learning_rate: "),
    "optimizer kind": ({"optimizer": {"kind": "sgd"}}, "optimizer.kind: "),
    "betas": ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1: "),
    "schedule field that is not read": ({"schedule": {"decay_fraction": 0.1}}, "schedule: decay_fraction is read only when"),
    "schedule longer than the run": (
        {"schedule": {"kind": "wsd", "warmup_fraction": 0.5, "decay_fraction": 0.6}},
        "schedule: warm-up (0.5) and decay (0.6)",
    ),
    "balance rule": ({"balance": {"rule": "loss"}}, "balance.rule: "),
    "balance step": ({"balance": {"rule": "sign", "gamma": 0}}, "balance.gamma: "),
    "steps": ({"run": {"steps": 0}}, "run.steps: "),
    "steps no number": ({"run": {"steps": "many"}}, "run.steps: "),
    "seed below zero": ({"run": {"seed": -1}}, "run.seed: "),
    "seed beyond 63 bits": ({"run": {"seed": 1 << 63}}, "run.seed: "),
    "dtype": ({"run": {"dtype": "float16"}}, "run.dtype: "),
    "sequence longer than a batch": (
        {"run": {"max_length": 300, "tokens_per_batch": 256}},
        "run.max_length (300) exceeds run.tokens_per_batch (256)",
    ),
    **{
        f"no {name}": ({"run": {name: 0}}, f"run.{name}: ")
        for name in ("tokens_per_batch", "micro_batches", "max_length", "threads", "eval_every", "checkpoint_every", "keep_checkpoints")
    },
}


@pytest.mark.parametrize(("tables", "named"), MISTAKES.values(), ids=MISTAKES.keys())
def test_each_mistake_is_one_sentence_that_names_the_field(tables: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe_from_data(changed(tables), "mine.toml")
    message = str(caught.value)
    assert message.startswith("mine.toml: ") and named in message and message.endswith("correct the recipe")
    assert "\n" not in message and "pydantic" not in message


def test_a_name_that_is_no_recipe_lists_those_there_are(tmp_path: Path) -> None:
    for name in ("k4-huge", str(tmp_path / "nowhere.toml")):
        with pytest.raises(UserError) as caught:
            load_recipe(name)
        assert name in str(caught.value) and all(known in str(caught.value) for known in packaged_recipes())


def test_a_file_that_is_no_recipe_says_so(tmp_path: Path) -> None:
    for content, reason in ((b"[model\n", "not valid TOML"), (b"\xff\xfe", "not text"), (b"", "model: ")):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(UserError, match=reason) as caught:
            load_recipe(str(tmp_path / "bad.toml"))
        assert "bad.toml" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="Is a directory"):
        load_recipe(str(tmp_path))


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"balance": {"rule": "quantile", "bins": 10}}, "bins is read only when rule is histogram"),
        ({"balance": {"rule": "histogram", "gamma": 0.1}}, "gamma is read only when rule is sign"),
        ({"tokenizer": {"kind": "byte", "vocab_size": 400}}, "vocab_size is read only when kind is bpe"),
    ],
    ids=["bins", "gamma", "vocab_size"],
)
def test_an_option_that_nothing_would_read_is_refused(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        recipe_from_data(changed(tables), "mine.toml")
