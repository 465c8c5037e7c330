"""Training runs small enough for tests: their recipes, corpora, models and trainers."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from perilune.model.config import ModelConfig
from perilune.model.decoder import Decoder
from perilune.model.hub_config import config_to_json
from perilune.train.display import TrainResult
from perilune.train.metrics_log import read_metrics
from perilune.train.packing import PackedDataset, TokenDocuments
from perilune.train.parallel import Ranks
from perilune.train.recipe import Recipe, recipe_from_data
from perilune.train.run import train
from perilune.train.trainer import Trainer
from tests.model.tiny_models import k3_config

VOCABULARY = 300


def write_config(path: Path, **changes: object) -> Path:
    """The config.json of a network with every part of K3, for byte tokens."""
    config = k3_config(**{"vocab_size": VOCABULARY, "attention": ("kda", "kda", "mla"), **changes})
    path.write_text(json.dumps(config_to_json(config, "float32")), encoding="utf-8")
    return path


def write_corpus(folder: Path, count: int = 12) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"The {number} lazy dogs counted {number * number} sheep and slept.\n" * 3, encoding="utf-8")
    return folder


def recipe_tables(place: Path, **run: Any) -> dict[str, Any]:
    """A tiny training run on a corpus written to `place`, as parsed TOML."""
    return {
        "model": {"config": str(write_config(place / "config.json"))},
        "tokenizer": {"kind": "byte"},
        "corpus": {"source": "directory", "path": str(write_corpus(place / "corpus")), "held_out_fraction": 0.2},
        "run": {"steps": 4, "tokens_per_batch": 64, "max_length": 32, "eval_every": 2, "eval_tokens": 64, "checkpoint_every": 2, **run},
    }


def recipe_with(place: Path, **tables: dict[str, Any] | None) -> Recipe:
    data = recipe_tables(place) | tables
    return recipe_from_data({table: fields for table, fields in data.items() if fields is not None}, "recipe")


def start(tables: dict[str, Any], out: Path, *, resume: bool = False) -> tuple[TrainResult, str]:
    """Run it; what it came to, and what it printed."""
    printed = io.StringIO()
    result = train(recipe_from_data(tables, "recipe"), out, resume=resume, console=Console(file=printed, width=200))
    return result, printed.getvalue()


def comparable_metrics(out: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, without what a clock said."""
    return [{name: value for name, value in line.items() if name != "tokens_per_s"} for line in read_metrics(out / "metrics.jsonl")]


CONFIG = k3_config(attention=("kda", "kda", "mla"))


def documents(count: int = 12, length: int = 16, seed: int = 0) -> TokenDocuments:
    """Random walks over the vocabulary of 32, so that there is something to learn."""
    steps = np.random.default_rng(seed).integers(1, 4, (count, length))
    return TokenDocuments((steps.cumsum(1) % 32).astype(np.int32).reshape(-1), np.arange(count + 1, dtype=np.int64) * length)


def recipe_of(tables: dict[str, Any] | None = None, **run: Any) -> Recipe:
    """A recipe for `trainer_of`; what it says of model, tokenizer and corpus is not read there."""
    data: dict[str, Any] = {"model": {"preset": "k3-tiny"}, "tokenizer": {"kind": "byte"}, "corpus": {}}
    return recipe_from_data({**data, **(tables or {}), "run": {"steps": 20, "tokens_per_batch": 64, "max_length": 16, **run}}, "here")


def fresh_model(config: ModelConfig = CONFIG, seed: int = 0) -> Decoder:
    model = Decoder(config)
    model.reset_parameters(seed)
    return model


def trainer_of(recipe: Recipe, texts: TokenDocuments | None = None, model: Decoder | None = None) -> Trainer:
    run = recipe.run
    texts = texts or documents()
    cut = texts.target_mask is None
    data = PackedDataset(texts, tokens_per_batch=run.tokens_per_batch, max_length=run.max_length, cut=cut, seed=run.seed)
    return Trainer(model or fresh_model(), data, recipe, Ranks(0, 1))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a checkpoint gives it back: copied, and of nothing but tensors and plain data."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
