"""Recipes: a training run as a TOML file, checked as a whole before anything is built.

A recipe that ships with Perilune is named without its suffix; any other is a path. `docs/guides/training.md` walks through one.
"""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from perilune.errors import UserError
from perilune.model.config import explain
from perilune.train.corpus import CorpusSettings
from perilune.train.optimizer import OptimizerSettings
from perilune.train.schedule import ScheduleSettings


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _refuse_unread(table: _Table, choice: str, readers: dict[str, str]) -> None:
    """Raise ValueError for a field that was given although only another value of `choice` reads it."""
    chosen = getattr(table, choice)
    for name, reader in readers.items():
        if name in table.model_fields_set and chosen != reader:
            raise ValueError(f"{name} is read only when {choice} is {reader}, and {choice} is {chosen}: remove it")


class ModelSettings(_Table):
    """The `[model]` table: a fresh network from a preset or a config.json, or the weights and tokenizer of a Hub directory."""

    preset: str | None = Field(None, description="name of a preset; its vocabulary size becomes the tokenizer's")
    config: Path | None = Field(None, description="a config.json")
    init_from: Path | None = Field(None, description="a Hub directory whose weights and tokenizer the run starts from")

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSettings":
        given = [name for name in ("preset", "config", "init_from") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"name exactly one of preset, config and init_from, not {len(given)} of them")
        return self


class TokenizerSettings(_Table):
    """The `[tokenizer]` table; without one, and for `init_from` always, the tokenizer is the starting directory's."""

    kind: Literal["byte", "bpe", "directory"] = Field("bpe", description="bytes, a BPE trained on the corpus, or an existing tokenizer")
    vocab_size: int = Field(1024, ge=300, description="bpe: size of the vocabulary, special tokens included")
    sample_bytes: int = Field(4_000_000, ge=1, description="bpe: about how much text it is trained on")
    directory: Path | None = Field(None, description="directory: where the tokenizer is")

    @model_validator(mode="after")
    def _directory_fits_kind(self) -> "TokenizerSettings":
        if (self.kind == "directory") != (self.directory is not None):
            raise ValueError("directory is given exactly when kind is 'directory'")
        _refuse_unread(self, "kind", {"vocab_size": "bpe", "sample_bytes": "bpe"})
        return self


class ChatSettings(_Table):
    """The `[chat]` table: supervised fine-tuning on conversations instead of a corpus."""

    path: Path = Field(description="a JSONL file, one conversation with `messages` a line")
    held_out_fraction: float = Field(0.02, ge=0.0, lt=1.0, description="share of conversations never trained on, by a hash of the line")


class BalanceSettings(_Table):
    """The `[balance]` table: how the router's selection bias is set between steps."""

    rule: Literal["quantile", "histogram", "sign", "none"] = Field(
        "quantile", description="Quantile Balancing, exact or by histogram; the sign rule; nothing"
    )
    bins: int = Field(1000, ge=2, description="histogram: bins per expert")
    gamma: float = Field(1e-3, gt=0.0, description="sign: step of the bias")

    @model_validator(mode="after")
    def _every_field_is_read(self) -> "BalanceSettings":
        _refuse_unread(self, "rule", {"bins": "histogram", "gamma": "sign"})
        return self


class RunSettings(_Table):
    """The `[run]` table."""

    steps: int = Field(ge=1, description="optimizer steps")
    tokens_per_batch: int = Field(4096, ge=2, description="tokens of one forward on one rank")
    micro_batches: int = Field(1, ge=1, description="forwards per step and rank, their gradients added")
    max_length: int = Field(256, ge=2, description="longest sequence; longer documents are cut, longer conversations dropped")
    seed: int = Field(0, ge=0, lt=1 << 63, description="of the initial weights and the data order")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the matrix products; weights and sums stay float32")
    threads: int = Field(1, ge=1, description="CPU threads per rank; small models are slower with more")
    eval_every: int = Field(100, ge=1, description="steps between evaluations on held-out text")
    eval_tokens: int = Field(32768, ge=2, description="about how many held-out tokens an evaluation reads")
    checkpoint_every: int = Field(100, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="how many checkpoints to keep")


class Recipe(_Table):
    """One training run. `description` says what it trains, how long it takes and what it should reach."""

    description: str = ""
    model: ModelSettings
    tokenizer: TokenizerSettings | None = None
    corpus: CorpusSettings | None = None
    chat: ChatSettings | None = None
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    balance: BalanceSettings = BalanceSettings()
    run: RunSettings

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if (self.corpus is None) == (self.chat is None):
            raise ValueError("a recipe trains on [corpus] or on [chat]: give exactly one of the two tables")
        if self.model.init_from is not None and self.tokenizer is not None:
            raise ValueError("with model.init_from the tokenizer comes from that directory: remove [tokenizer]")
        if self.model.init_from is None and self.tokenizer is None:
            raise ValueError("a fresh model needs a [tokenizer] table")
        if self.chat is not None and self.tokenizer is not None and self.tokenizer.kind == "bpe":
            raise ValueError("a BPE is trained on a corpus: with [chat], use tokenizer kind 'byte' or 'directory', or model.init_from")
        if self.run.max_length > self.run.tokens_per_batch:
            raise ValueError(f"run.max_length ({self.run.max_length}) exceeds run.tokens_per_batch ({self.run.tokens_per_batch})")
        return self


def packaged_recipes() -> tuple[str, ...]:
    """Names of the recipes that ship with Perilune."""
    folder = resources.files("perilune") / "recipes"
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def load_recipe(name: str) -> Recipe:
    """The recipe of that name or path. Relative paths in a recipe are relative to the working directory.

    Raises UserError naming the field that is unknown, missing, contradictory or out of range.
    """
    path = Path(name)
    if name in packaged_recipes():
        text = (resources.files("perilune") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UserError(
                f"cannot read the recipe {name} ({reason}): give a TOML file or one of {', '.join(packaged_recipes())}"
            ) from None
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name} is not valid TOML: {error}") from None
    return recipe_from_data(data, name)


def recipe_from_data(data: dict[str, Any], source: str) -> Recipe:
    """A recipe from parsed TOML or JSON; `source` opens the message of the UserError."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(error)}; correct the recipe") from None
