"""The network a run starts from."""

import os

from perilune.errors import UserError
from perilune.model.config import ModelConfig
from perilune.model.decoder import Decoder
from perilune.model.footprint import footprint
from perilune.model.hub import load_model
from perilune.model.hub_config import read_config
from perilune.model.presets import preset
from perilune.model.tokenizer import Tokenizer
from perilune.train.recipe import ModelSettings, Recipe

_BYTES_PER_PARAMETER = 16  # the weight, its gradient and two moments, in fp32


def initial_config(settings: ModelSettings) -> ModelConfig:
    """The configuration the recipe names, before its vocabulary is known: cheap, so that a run can fail before it reads its data.

    Raises UserError for an unknown or damaged one, and for a network whose training cannot fit this machine's memory.
    """
    if settings.preset is not None:
        config = preset(settings.preset)
    else:
        path = settings.config if settings.config is not None else settings.init_from
        assert path is not None  # ModelSettings takes exactly one of the three
        config = read_config(path)
    needed = footprint(config).total_parameters * _BYTES_PER_PARAMETER
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UserError(
            f"training this model takes at least {needed / 1e9:,.0f} GB and this machine has {memory / 1e9:,.0f} GB of memory: "
            "choose a smaller model, such as the preset k3-tiny"
        )
    return config


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> Decoder:
    """The network at its start: fresh weights from the recipe's seed, or those of `init_from`.

    A preset takes the tokenizer's vocabulary size; raises UserError when another network has fewer embeddings than that.
    """
    config = initial_config(recipe.model)
    if recipe.model.preset is not None:
        config = config.model_copy(update={"vocab_size": tokenizer.vocab_size})
    elif tokenizer.vocab_size > config.vocab_size:
        sizes = f"the tokenizer has {tokenizer.vocab_size} tokens but the model only {config.vocab_size}"
        raise UserError(f"{sizes}: use the tokenizer that the model was made with, or a smaller one")
    if recipe.model.init_from is not None:
        return load_model(recipe.model.init_from)
    tokens = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.end_of_message_id, "pad_token_id": tokenizer.pad_id}
    model = Decoder(ModelConfig.model_validate(config.model_dump() | tokens))
    model.reset_parameters(recipe.run.seed)
    return model
