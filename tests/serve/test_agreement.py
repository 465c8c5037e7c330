"""Engine and trainer agree: on golden networks for any chunking, and on a trained network in fp32 to the limits that RL needs.

A trainer sees whole sequences in one packed forward; the engine saw them in prefill chunks and single tokens, in a changing batch.
"""

import numpy as np
import pytest
import torch

from perilune.bench.agreement import (
    FLIPS_GOAL,
    GAP_GOAL,
    REPLAYED_MAX_GOAL,
    agreement_of,
    generate_all,
    measure_agreement,
    read_as_trainer,
    requests_from_text,
    trained_model,
)
from perilune.model.hub import load_model
from perilune.model.tokenizer import load_tokenizer
from perilune.serve.engine import Engine, EngineSettings
from perilune.serve.generation import GenerationRequest, SamplingParams
from perilune.train.recipe import load_recipe
from tests.model.test_golden import GOLDEN, MODELS


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prefill_tokens", [64, 128])
@pytest.mark.parametrize("max_sequences", [1, 2])
def test_the_engine_continues_golden_networks_as_recorded_with_the_recorded_probabilities(name, prefill_tokens, max_sequences):
    data = np.load(GOLDEN / name / "logits.npz")
    model = load_model(GOLDEN / name)
    requests = [
        GenerationRequest(tuple(data[f"ids_{i}"].tolist()), SamplingParams(max_tokens=13, temperature=0, top_logprobs=20), True)
        for i in (0, 1)
    ]
    engine = Engine(load_model(GOLDEN / name), EngineSettings(max_sequences, 128, prefill_tokens))
    generations = generate_all(engine, requests)
    reading = read_as_trainer(model, generations)
    for i, generation in enumerate(generations):
        assert generation.token_ids == tuple(data[f"next_ids_{i}"].tolist())
        logits = np.concatenate([data[f"logits_{i}"][-1:], data[f"decode_logits_{i}"]])
        expected = torch.from_numpy(logits).log_softmax(-1)
        for token, row in zip(generation.tokens, expected, strict=True):
            assert abs(token.logprob - float(row[token.id])) < 1e-3
            assert all(abs(value - float(row[other])) < 1e-3 for other, value in token.top)
        assert np.abs(np.array(generation.logprobs) - reading.logprobs[i].numpy()).max() < 1e-3
        assert torch.equal(generation.finished.experts, reading.experts[i][:-1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A few steps of the packaged recipe: gates, routers and norms have moved away from their start."""
    recipe = load_recipe("k3-tiny-stdlib")
    corpus = recipe.corpus.model_copy(update={"max_bytes": 400_000})
    run = recipe.run.model_copy(update={"steps": 40, "eval_every": 40, "tokens_per_batch": 512, "eval_tokens": 512})
    threads = torch.get_num_threads()
    yield trained_model(recipe.model_copy(update={"corpus": corpus, "run": run}), tmp_path_factory.mktemp("trained"))
    torch.set_num_threads(threads)


def test_on_a_trained_network_log_probabilities_agree_to_1e_5_and_experts_hardly_ever_flip(trained):
    result = agreement_of(trained, sequences=32)
    assert result.sampled > 2000 and result.decisions > 30_000
    assert len(result.before_flip) > 0.8 * result.sampled
    assert result.before_flip.quantile(0.999) <= GAP_GOAL
    assert result.replayed.quantile(0.999) <= GAP_GOAL and result.replayed.max() <= REPLAYED_MAX_GOAL
    assert result.flips_per_10k <= FLIPS_GOAL


def test_the_comparison_sees_a_lower_precision_and_flipped_experts_and_that_replay_removes_their_share(trained):
    """What the limits above would look like if they were missed: a bf16 engine beside the fp32 trainer."""
    engine = Engine(load_model(trained, torch.bfloat16), EngineSettings(16, 256, 128))
    result = measure_agreement(engine, load_model(trained), requests_from_text(load_tokenizer(trained), 16, 100, 60))
    assert result.flips_per_10k > 10
    assert result.replayed.quantile(0.999) > 1e-3
    assert len(result.before_flip) < 0.9 * result.sampled
