"""From a Hub directory to a running engine, for `perilune serve` and `perilune chat`."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from perilune.errors import UserError
from perilune.model.config import ModelConfig
from perilune.model.footprint import footprint
from perilune.model.hub import load_model
from perilune.model.hub_config import read_config
from perilune.model.plan import short_count
from perilune.model.tokenizer import Tokenizer, load_tokenizer
from perilune.serve.client.in_process import InProcessClient
from perilune.serve.engine import EngineSettings
from perilune.serve.memory import free_memory
from perilune.serve.scheduler import PREFILL_GRID
from perilune.serve.state_pool import pool_bytes
from perilune.serve.weights import largest_update

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ONE_THREAD_PARAMETERS = 50_000_000
"""Below so many active parameters a second thread costs more than it brings."""


@dataclass(frozen=True)
class LaunchOptions:
    """`name`: what requests call the model; the directory's by default. `max_length=None`: the model's longest context, or what half
    of the free memory holds for all sequences. `threads=None`: one for a small model, else one per core."""

    directory: Path
    name: str | None = None
    dtype: str = "float32"
    max_sequences: int = 16
    max_length: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Launched:
    """A running engine and the tokenizer of its model. `summary`: what it is, in one line for people. `largest_update`: bytes of the
    largest file of new weights that can be meant for it."""

    client: InProcessClient
    tokenizer: Tokenizer
    summary: str
    largest_update: int


def launch(options: LaunchOptions) -> Launched:
    """Load the model and start its engine. Raises UserError for whatever is wrong with directory, options or memory."""
    if options.dtype not in DTYPES:
        raise UserError(f"dtype {options.dtype!r} is not one the engine computes in: use {' or '.join(DTYPES)}")
    for name, value in (("max_sequences", options.max_sequences), ("max_length", options.max_length), ("threads", options.threads)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}: it must be at least 1")
    dtype = DTYPES[options.dtype]
    config = read_config(options.directory)
    cost = footprint(config)
    needed, free = cost.total_parameters * dtype.itemsize, free_memory()
    if needed > free:
        raise UserError(
            f"the weights take {needed / 1e9:,.1f} GB in {options.dtype} and {free / 1e9:,.1f} GB of memory are free: "
            "serve a smaller model, or in bfloat16"
        )
    tokenizer = load_tokenizer(options.directory)
    if tokenizer.vocab_size > config.vocab_size:
        sizes = f"the tokenizer in {options.directory} has {tokenizer.vocab_size} tokens but the model only {config.vocab_size}"
        raise UserError(f"{sizes}: put the tokenizer there that the model was made with")
    model = load_model(options.directory, dtype)
    torch.set_num_threads(options.threads or (1 if cost.active_parameters < _ONE_THREAD_PARAMETERS else os.cpu_count() or 1))
    length = options.max_length or _default_length(config, options.max_sequences, dtype)
    settings = EngineSettings(options.max_sequences, length, num_ids=tokenizer.vocab_size)
    name = options.name or options.directory.resolve().name
    summary = (
        f"{name}: {short_count(cost.total_parameters)} parameters in {options.dtype}, up to {options.max_sequences} sequences of "
        f"{length:,} tokens ({pool_bytes(config, options.max_sequences, length, dtype) / 1e6:,.0f} MB of states), "
        f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    )
    return Launched(InProcessClient(model, settings, name=name), tokenizer, summary, largest_update(model))


def _default_length(config: ModelConfig, sequences: int, dtype: torch.dtype) -> int:
    fixed = pool_bytes(config, sequences, 0, dtype)
    grid = pool_bytes(config, sequences, PREFILL_GRID, dtype) - fixed
    fitting = (free_memory() // 2 - fixed) // grid * PREFILL_GRID if grid else config.max_position_embeddings
    # At least something: if not even that fits, the pool says by how much.
    return min(config.max_position_embeddings, max(fitting, PREFILL_GRID))
