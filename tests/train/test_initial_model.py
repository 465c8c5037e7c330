"""The network a run starts from."""

from pathlib import Path

import pytest
import torch

from perilune.errors import UserError
from perilune.model.decoder import Decoder
from perilune.model.hub import save_model
from perilune.model.presets import PRESETS
from perilune.model.tokenizer import ByteTokenizer
from perilune.train.initial_model import build_model, initial_config
from perilune.train.recipe import ModelSettings
from perilune.train.sources import prepare
from tests.model.tiny_models import k3_config, random_model
from tests.train.tiny_runs import VOCABULARY, recipe_tables, recipe_with, write_config


def test_a_preset_gets_the_tokenizers_vocabulary_and_a_config_keeps_its_own(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    model = build_model(recipe_with(tmp_path, model={"preset": "k3-tiny"}), tokenizer)
    assert (model.config.vocab_size, model.config.eos_token_id) == (tokenizer.vocab_size, tokenizer.end_of_message_id)
    assert (model.config.bos_token_id, model.config.pad_token_id) == (tokenizer.bos_id, tokenizer.pad_id)
    assert build_model(recipe_with(tmp_path), tokenizer).config.vocab_size == VOCABULARY


def test_fresh_weights_are_those_of_the_seed(tmp_path: Path) -> None:
    def weight(seed: int) -> torch.Tensor:
        run = {**recipe_tables(tmp_path)["run"], "seed": seed}
        return build_model(recipe_with(tmp_path, run=run), ByteTokenizer()).lm_head.weight

    assert torch.equal(weight(3), weight(3)) and not torch.equal(weight(3), weight(4))


def test_a_run_may_start_from_a_hub_directory(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    model = random_model(k3_config(vocab_size=VOCABULARY), torch.float32)
    save_model(model, tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    recipe = recipe_with(tmp_path, model={"init_from": str(tmp_path / "model")}, tokenizer=None)
    assert isinstance(prepare(recipe, None).tokenizer, ByteTokenizer)
    found = build_model(recipe, tokenizer)
    assert isinstance(found, Decoder)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.state_dict().items())


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    small = {"config": str(write_config(tmp_path / "small.json", vocab_size=200))}
    save_model(random_model(k3_config(vocab_size=200), torch.float32), tmp_path / "model")
    sizes = rf"the tokenizer has {tokenizer.vocab_size} tokens but the model only 200"
    with pytest.raises(UserError, match=sizes):
        build_model(recipe_with(tmp_path, model=small), tokenizer)
    with pytest.raises(UserError, match=sizes):
        build_model(recipe_with(tmp_path, model={"init_from": str(tmp_path / "model")}, tokenizer=None), tokenizer)


def test_an_unknown_preset_lists_those_there_are(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, model={"preset": "k4"})
    with pytest.raises(UserError) as caught:
        build_model(recipe, ByteTokenizer())
    assert "'k4'" in str(caught.value) and all(name in str(caught.value) for name in PRESETS)


def test_a_network_that_cannot_fit_the_memory_is_refused_before_any_data_is_read() -> None:
    with pytest.raises(UserError, match=r"takes at least 44,472 GB"):
        initial_config(ModelSettings(preset="kimi-k3"))
