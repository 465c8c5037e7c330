"""From a directory to an engine, and every way in which that goes wrong."""

import asyncio
import os
from pathlib import Path

import pytest
import torch

from perilune.errors import UserError
from perilune.serve import launch as launch_module
from perilune.serve.generation import GenerationRequest, SamplingParams
from perilune.serve.launch import LaunchOptions, launch
from tests.model.tiny_models import k3_config
from tests.serve.small_engines import save_small_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("served") / "tiny", vocab_size=300, max_length=512)


@pytest.fixture(autouse=True)
def same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def launched(options: LaunchOptions):
    result = launch(options)
    info = asyncio.run(result.client.info())
    answer = asyncio.run(result.client.generate(GenerationRequest((1, 2, 3), SamplingParams(max_tokens=100, temperature=30.0, seed=1))))
    asyncio.run(result.client.close())
    return result, info, answer


def test_a_directory_becomes_an_engine_that_samples_only_what_its_tokenizer_knows(directory):
    result, info, answer = launched(LaunchOptions(directory))
    assert (info.name, info.max_length, info.vocab_size) == ("tiny", 512, 300)
    assert result.summary == "tiny: 29.66K parameters in float32, up to 16 sequences of 512 tokens (1 MB of states), 1 thread"
    assert len(answer.tokens) == 100 and max(answer.token_ids) < result.tokenizer.vocab_size == 268


def test_options_are_followed(directory):
    result = launch(LaunchOptions(directory, "mine", "bfloat16", max_sequences=2, max_length=300, threads=2))
    info = asyncio.run(result.client.info())
    asyncio.run(result.client.close())
    assert (info.name, info.max_length) == ("mine", 300)
    assert "in bfloat16, up to 2 sequences of 300 tokens" in result.summary and result.summary.endswith("2 threads")


def test_the_length_is_by_default_what_half_of_the_memory_holds(directory, monkeypatch):
    config = k3_config(vocab_size=300)
    fixed, token = (launch_module.pool_bytes(config, 16, n, torch.float32) for n in (0, 1))
    monkeypatch.setattr(launch_module, "free_memory", lambda: 2 * (fixed + 200 * (token - fixed)))
    assert launched(LaunchOptions(directory))[1].max_length == 192


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directory": Path("/no/such/place")}, "/no/such/place"),
        ({"dtype": "int4"}, "dtype 'int4' is not one the engine computes in: use float32 or bfloat16"),
        ({"max_sequences": 0}, "max_sequences is 0: it must be at least 1"),
        ({"max_length": -5}, "max_length is -5"),
        ({"threads": 0}, "threads is 0"),
        ({"max_sequences": 10**9}, "lower --max-sequences or --max-length"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(directory, options, message):
    with pytest.raises(UserError, match=message):
        launch(LaunchOptions(**{"directory": directory} | options))


def test_a_model_larger_than_the_memory_is_refused_before_it_is_read(directory, monkeypatch):
    monkeypatch.setattr(launch_module, "free_memory", lambda: 1000)
    monkeypatch.setattr(launch_module, "load_model", lambda *arguments: pytest.fail("the weights were read"))
    with pytest.raises(UserError, match=r"the weights take 0\.0 GB in float32 and 0\.0 GB of memory are free"):
        launch(LaunchOptions(directory))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_a_directory_that_lacks_a_file_is_refused(directory, tmp_path, missing):
    for file in directory.iterdir():
        if file.name != missing:
            os.link(file, tmp_path / file.name)
    with pytest.raises(UserError, match=str(tmp_path)):
        launch(LaunchOptions(tmp_path))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    save_small_model(tmp_path, vocab_size=100, max_length=512)
    with pytest.raises(UserError, match="has 268 tokens but the model only 100"):
        launch(LaunchOptions(tmp_path))
